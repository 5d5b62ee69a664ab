// y[0][c] = mean of x over channel c,  y[1][c] = mean of (x - y[0][c])^2
//
// One CTA per channel, one pass: a thread keeps a running mean and squared deviations (Welford), and lanes merge theirs
// by shuffles. Limiter: one load in flight, because each step depends on the last, on as many SMs as there are
// channels.
//
// Rung: `one_pass`, also of `batch_norm_training`. Read moments.cuh (merging), batch_statistics.cuh.
#include "batch_statistics/batch_statistics.cuh"
#include "common/moments.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
using Index = unsigned;       // index: counts elements; 64 bits only where needed, since 64-bit divisions are slow
constexpr bool NHWC = true;   // problem.layout == "nhwc" or problem.pixels == 1: one pixel is alike in both layouts
constexpr int THREADS = 256;  // config.threads
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_statistics_one_pass(const Element* __restrict__ x, float* y, Results results, int channels, int plane,
                              long long count, float epsilon, float momentum) {
    wait_for_previous_launch();
    const int c = blockIdx.x;
    Moments mine{};
    for (Index at = threadIdx.x; at < count; at += THREADS) {
        const Index image = at / plane;
        const long long from = NHWC ? 1LL * at * channels + c : (1LL * image * channels + c) * plane + (at - image * plane);
        const float value = to_float(x[from]), distance = value - mine.mean;
        mine.count += 1.f;
        mine.mean += __fdividef(distance, mine.count);
        mine.squares += distance * (value - mine.mean);
    }
    mine = block_merged<THREADS>(mine);
    if (threadIdx.x == 0)
        store_statistics(y, results, c, channels, mine.mean, mine.squares, mine.count, epsilon, momentum);
}
