// y[n][p][c] = activated((x[n][p][c] - mean) / sqrt(variance + epsilon) * weight[c] + bias[c])
//
// Second of two launches. A CTA merges the moments of all shares of its image, in a fixed order, and
// normalizes one share, PACKS pixels of up to 16 bytes per thread in flight, the first of them before it merges. CTAs
// run backwards, because L2 still holds what was read last. Limiter: memory, each element is read and written once.
//
// Rung: `split`. Read group_norm.cuh (groups of a CTA).
#include "group_norm/group_norm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    group_norm_split_normalise(const Element* x, const Part* partial, const Parameter* weight,
                               const Parameter* bias, Result* y, int pixels, int x_pitch, int y_pitch, int splits,
                               int per_split, float epsilon, float* mean, float* rstd) {
    __shared__ Statistic statistics[GROUPS];
    wait_for_previous_launch();
    const int block = gridDim.x - 1 - blockIdx.x;
    const int image = block / splits, split = block - image * splits;
    const int row = threadIdx.x / WIDTH, pack = threadIdx.x % WIDTH;
    const int channel = (blockIdx.y * WIDTH + pack) * VECTOR;
    const int groups = GROUPS * gridDim.y;
    const int begin = split * per_split, here = row < HEIGHT ? min(per_split, pixels - begin) : 0;
    const long long first = 1LL * image * pixels + begin;
    Values loaded[PACKS];
    const auto load = [&](int at) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
            if (at + i * HEIGHT < here)
                loaded[i] = load_pack<Element, VECTOR>(x + (first + at + i * HEIGHT) * x_pitch + channel);
    };
    load(row);

    const Part* parts = partial + 1LL * image * splits * groups + blockIdx.y * GROUPS;
    merge_groups(
        splits,
        [&](int group, int entry) {
            const Part part = parts[1LL * entry * groups + group];
            const int count = min(per_split, pixels - entry * per_split) * GROUP_CHANNELS;
            return Moments{static_cast<float>(count), part.mean, part.squares};
        },
        [&](int group, const Moments& found) {
            statistics[group] = statistic_of(found, epsilon);
            if (split == 0) Statistics{mean, rstd}.write(image, group, statistics[group]);
        });
    __syncthreads();
    if (row >= HEIGHT) return;

    const Channels channels(statistics, pack, channel, weight, bias);
    const Planes planes(image, weight, bias);
    for (int at = row; at < here; at += PACKS * HEIGHT) {
        if (at > row) load(at);
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
            if (at + i * HEIGHT < here)
                store_pack(y + (first + at + i * HEIGHT) * y_pitch + channel,
                           channels.normalized(loaded[i], planes, begin + at + i * HEIGHT));
    }
}
