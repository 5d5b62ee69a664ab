// y[0][c], y[1][c] = mean and variance of channel c, from the means and squared distances of its parts
//
// The second of two launches. A block takes CHANNELS channels, with THREADS / CHANNELS threads for each, which go
// through the splits in turn and then meet in shared memory: always in the same order, so that every run gives the same
// bits. Of a channel's elements, groups of `unit` go round the splits; the last group has the rest. What bounds it:
// latency.
//
// Serves `split`, and `batch_norm_training`. moments.cuh has how moments are merged, batch_statistics.cuh what
// is left of a channel.
#include "batch_statistics/batch_statistics.cuh"
#include "common/moments.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_statistics_split_merge(const float* partial, float* y, Results results, int channels, int splits,
                                 long long unit, long long count, float epsilon, float momentum) {
    constexpr int LANES = THREADS / CHANNELS;
    __shared__ Moments of_lane[LANES][CHANNELS];
    wait_for_previous_launch();
    const int in_block = threadIdx.x % CHANNELS, lane = threadIdx.x / CHANNELS;
    const int c = blockIdx.x * CHANNELS + in_block;

    const long long groups = (count + unit - 1) / unit, missing = groups * unit - count;
    const int last = static_cast<int>((groups - 1) % splits);
    Moments mine{};
    if (c < channels) {
#pragma unroll 4
        for (int split = lane; split < splits; split += LANES) {
            const long long own = (groups - split + splits - 1) / splits;
            const float elements = static_cast<float>(own * unit - (split == last ? missing : 0));
            mine = merged(mine, {elements, partial[1LL * split * channels + c],
                                 partial[(1LL * splits + split) * channels + c]});
        }
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        of_lane[lane][in_block] = mine;
        __syncthreads();
        if (lane < half) mine = merged(mine, of_lane[lane + half][in_block]);
        __syncthreads();
    }
    if (lane == 0 && c < channels)
        leave(y, results, c, channels, mine.mean, mine.squares, mine.count, epsilon, momentum);
}
