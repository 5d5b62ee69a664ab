// y[0][c], y[1][c] = mean and variance of channel c, from the means and squared deviations of its parts
//
// Second of two launches. One CTA per CHANNELS channels, THREADS / CHANNELS threads each, which loop over the splits,
// PACKS in flight, and merge in smem. The order is fixed, so every run gives the same bits. Limiter: latency.
//
// Rung: `split`, also of `batch_norm_training`. Read moments.cuh (merging), batch_statistics.cuh.
#include "batch_statistics/batch_statistics.cuh"
#include "common/moments.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int THREADS = 512;  // threads
constexpr int CHANNELS = 8;   // channels: channels per CTA
constexpr int PACKS = 9;      // packs: loads in flight per thread
#endif

// Elements of a channel per split: the first `longer` splits have `unit` more, and the last unit of all, in split
// `last`, may lack `missing`.
struct Shares {
    int each, unit, longer, last, missing;

    __device__ __forceinline__ float of(int split) const {
        return static_cast<float>(each) + static_cast<float>((split < longer ? unit : 0) - (split == last ? missing : 0));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_statistics_split_merge(const float* partial, float* y, Results results, int channels, int splits,
                                 Shares shares, float epsilon, float momentum) {
    constexpr int LANES = THREADS / CHANNELS;
    __shared__ Moments of_lane[LANES][CHANNELS];
    wait_for_previous_launch();
    const int in_block = threadIdx.x % CHANNELS, lane = threadIdx.x / CHANNELS;
    const int c = blockIdx.x * CHANNELS + in_block;

    Moments mine{};
    for (int first = lane; first < splits && c < channels; first += PACKS * LANES) {
        Moments parts[PACKS];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int split = first + i * LANES;
            parts[i] = {};
            if (split < splits)
                parts[i] = {shares.of(split), partial[1LL * split * channels + c],
                            partial[(1LL * splits + split) * channels + c]};
        }
#pragma unroll
        for (int i = 0; i < PACKS; ++i) mine = merged(mine, parts[i]);
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        of_lane[lane][in_block] = mine;
        __syncthreads();
        if (lane < half) mine = merged(mine, of_lane[lane + half][in_block]);
        __syncthreads();
    }
    if (lane == 0 && c < channels)
        store_statistics(y, results, c, channels, mine.mean, mine.squares, mine.count, epsilon, momentum);
}
