// partial[0][split][c], partial[1][split][c] = mean and squared deviations of a share of channel c               (NCHW)
//
// Several CTAs per channel, enough to fill every SM, with PACKS accesses of VECTOR elements in flight per thread. Each
// iteration's elements are summed in registers and merged into the thread's moments: one merge per PACKS * VECTOR
// elements instead of a Welford step each. A second launch merges the CTAs' results in a fixed order: no atomics, so
// every run gives the same bits. Limiter: memory, each element is read once.
//
// Rung: `split`, also of `batch_norm_training`. Read moments.cuh (merging).
#include "common/moments.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
using Index = unsigned;       // index: counts elements; 64 bits only where needed, since 64-bit divisions are slow
constexpr int VECTOR = 4;     // vector: elements per access
constexpr int PACKS = 4;      // config.packs: accesses in flight per thread
constexpr int THREADS = 256;  // config.threads
#endif

// A thread's share of a channel: packs THREADS apart.
struct Share {
    const Element* x;
    Index at, end;
    int c, channels, plane;
    Moments mine;

    // Takes up to COUNT more packs. Their mean and squared deviations are computed first: one merge for
    // all.
    template <int COUNT>
    __device__ __forceinline__ bool take() {
        if (at + (COUNT - 1) * THREADS >= end) return false;
        const Index plane_packs = plane / VECTOR;
        Pack<Element, VECTOR> packs[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const Index pack = at + i * THREADS, image = pack / plane_packs;
            const int in_plane = static_cast<int>(pack - image * plane_packs) * VECTOR;
            packs[i] = load_pack<Element, VECTOR>(x + (1LL * image * channels + c) * plane + in_plane);
        }
        float sum = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) sum += to_float(packs[i].at[e]);
        const float mean = sum * (1.f / (COUNT * VECTOR));
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float distance = to_float(packs[i].at[e]) - mean;
                squares += distance * distance;
            }
        mine = merged(mine, {COUNT * VECTOR, mean, squares});
        at += COUNT * THREADS;
        return true;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_statistics_split_planes(const Element* __restrict__ x, float* partial, int channels, int plane, int splits,
                                  long long packs, long long packs_per_split) {
    wait_for_previous_launch();
    const int c = blockIdx.x / splits, split = blockIdx.x - c * splits;
    const Index begin = static_cast<Index>(split * packs_per_split);
    const Index end = static_cast<Index>(min(packs, split * packs_per_split + packs_per_split));

    Share share{x, begin + threadIdx.x, end, c, channels, plane, {}};
    while (share.take<PACKS>()) {}
    if constexpr (PACKS > 4) share.take<4>();
    if constexpr (PACKS > 2) share.take<2>();
    share.take<1>();
    const Moments mine = block_merged<THREADS>(share.mine);
    if (threadIdx.x == 0) {
        partial[1LL * split * channels + c] = mine.mean;
        partial[(1LL * splits + split) * channels + c] = mine.squares;
    }
}
