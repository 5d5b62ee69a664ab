// partial[0][split][c], partial[1][split][c] = mean and squared distances of a share of channel c                (NCHW)
//
// Several blocks a channel, as many as keep every SM busy, and PACKS accesses of VECTOR elements under way in a thread.
// What one turn brings is summed in registers, first for its mean, then for the squares around it, and merged into the
// thread's own: one merge for PACKS * VECTOR elements instead of a Welford step for each. Blocks leave their results
// for a second launch, which merges them in a fixed order: no atomics, so every run gives the same bits. What bounds
// it: memory, each element read once.
//
// Serves `split`, and `batch_norm_training`. moments.cuh has how moments are merged.
#include "common/moments.cuh"
#include "common/ptx.cuh"

// A turn of `present` packs, at least one; the others hold zeros that nobody counts.
__device__ __forceinline__ Moments moments_of(const Pack<Element, VECTOR> (&packs)[PACKS], int present) {
    const float count = static_cast<float>(present * VECTOR);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sum += to_float(packs[i].at[e]);
    const float mean = sum / count;
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const float distance = to_float(packs[i].at[e]) - mean;
            if (i < present) squares += distance * distance;
        }
    return {count, mean, squares};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_statistics_split_planes(const Element* __restrict__ x, float* partial, int channels, int plane, int splits,
                                  long long packs, long long packs_per_split) {
    wait_for_previous_launch();
    const int c = blockIdx.x / splits, split = blockIdx.x - c * splits;
    const int plane_packs = plane / VECTOR;
    const Index begin = static_cast<Index>(split * packs_per_split);
    const Index end = static_cast<Index>(min(packs, split * packs_per_split + packs_per_split));

    Moments mine{};
    for (Index at = begin + threadIdx.x; at < end; at += THREADS * PACKS) {
        Pack<Element, VECTOR> values[PACKS] = {};
        int present = 0;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const Index pack = at + i * THREADS;
            if (pack >= end) continue;
            const Index image = pack / plane_packs;
            const int in_plane = static_cast<int>(pack - image * plane_packs) * VECTOR;
            values[i] = load_pack<Element, VECTOR>(x + (1LL * image * channels + c) * plane + in_plane);
            present = i + 1;
        }
        mine = merged(mine, moments_of(values, present));
    }
    mine = block_merged<THREADS>(mine);
    if (threadIdx.x == 0) {
        partial[1LL * split * channels + c] = mine.mean;
        partial[(1LL * splits + split) * channels + c] = mine.squares;
    }
}
