// partial[0][split][c], partial[1][split][c] = mean and squared deviations of channel c over a share of the rows (NHWC)
//
// A row is a pixel's channels. A thread keeps VECTOR channels, up to 16 bytes, and walks down the rows in steps of the
// whole grid, PACKS steps in flight, so that the last rows are left in L2. A CTA is `width` packs wide; at the end its
// threads with the same channels reduce in smem, first the mean, then the squared deviations. Each iteration's rows are
// summed in registers in the same two steps: one merge per PACKS rows instead of a Welford step each. A second launch
// merges the CTAs' results in a fixed order: no atomics, so every run gives the same bits. Limiter: memory, each
// element is read once.
//
// Rung: `split`, also of `batch_norm_training`. Read moments.cuh (merging).
#include "common/moments.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
constexpr int VECTOR = 4;     // vector: channels per access
constexpr int PACKS = 4;      // config.packs: accesses in flight per thread
constexpr int THREADS = 256;  // config.threads
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_statistics_split_rows(const Element* __restrict__ x, float* partial, int channels, int width, int splits,
                                long long rows) {
    __shared__ float counts[THREADS], all_means[VECTOR][THREADS], all_squares[VECTOR][THREADS];
    wait_for_previous_launch();
    const int height = THREADS / width;
    const int row_in_block = threadIdx.x / width;
    const int channel = (blockIdx.y * width + threadIdx.x - row_in_block * width) * VECTOR;
    const bool works = row_in_block < height && channel < channels;

    float count = 0.f, means[VECTOR] = {}, squares[VECTOR] = {};
    if (works) {
        const long long step = 1LL * splits * height;
        long long row = 1LL * blockIdx.x * height + row_in_block;
        for (; row + (PACKS - 1) * step < rows; row += PACKS * step)
            take_rows<PACKS>(x + row * channels + channel, step * channels, count, means, squares);
        if constexpr (PACKS > 4)
            if (row + 3 * step < rows) {
                take_rows<4>(x + row * channels + channel, step * channels, count, means, squares);
                row += 4 * step;
            }
        if constexpr (PACKS > 2)
            if (row + step < rows) {
                take_rows<2>(x + row * channels + channel, step * channels, count, means, squares);
                row += 2 * step;
            }
        if (row < rows) take_rows<1>(x + row * channels + channel, 0, count, means, squares);
    }

    counts[threadIdx.x] = count;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) all_means[e][threadIdx.x] = means[e], all_squares[e][threadIdx.x] = squares[e];
    __syncthreads();
    for (int at = threadIdx.x; at < VECTOR * width; at += THREADS) {
        const int e = at % VECTOR, pack = at / VECTOR, c = (blockIdx.y * width + pack) * VECTOR + e;
        if (c >= channels) continue;
        const float from = all_means[e][pack];  // deviations from a mean are small, and so are their rounding errors
        float all = 0.f, moved = 0.f, around = 0.f;
        for (int i = 0; i < height; ++i) {
            const float more = counts[i * width + pack];
            all += more;
            if (more > 0.f) moved += more * (all_means[e][i * width + pack] - from);
        }
        const float mean = from + moved / all;
        for (int i = 0; i < height; ++i) {
            const float distance = all_means[e][i * width + pack] - mean;
            around += all_squares[e][i * width + pack] + distance * (distance * counts[i * width + pack]);
        }
        partial[1LL * blockIdx.x * channels + c] = mean;
        partial[(1LL * splits + blockIdx.x) * channels + c] = around;
    }
}
