// partial[n][split][group] = mean and squared deviations of a group over a share of the pixels of image n
//
// First of two launches. A thread keeps up to 16 bytes of channels and walks down its CTA's pixels, PACKS in flight;
// threads of one group merge through smem. The second launch merges the CTAs' results. Limiter: memory, each element is
// read once.
//
// Rung: `split`. Read group_norm.cuh (groups of a CTA).
#include "group_norm/group_norm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    group_norm_split_moments(const Element* x, Part* partial, int pixels, int x_pitch, int splits, int per_split) {
    wait_for_previous_launch();
    const int image = blockIdx.x / splits, split = blockIdx.x - image * splits;
    const int row = threadIdx.x / WIDTH, pack = threadIdx.x % WIDTH;
    const int begin = split * per_split, here = min(per_split, pixels - begin);
    const Element* from =
        x + (1LL * image * pixels + begin) * x_pitch + (blockIdx.y * WIDTH + pack) * VECTOR;

    float count = 0.f, means[VECTOR] = {}, squares[VECTOR] = {};
    const long long step = 1LL * HEIGHT * x_pitch;
    if (row < HEIGHT) {
        int at = row;
        for (; at + (PACKS - 1) * HEIGHT < here; at += PACKS * HEIGHT)
            take_rows<PACKS>(from + 1LL * at * x_pitch, step, count, means, squares);
        for (; at < here; at += HEIGHT) take_rows<1>(from + 1LL * at * x_pitch, step, count, means, squares);
    }

    Part parts[UNITS];
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        Moments all{};
#pragma unroll
        for (int e = unit * UNIT; e < (unit + 1) * UNIT; ++e) all = merged(all, {count, means[e], squares[e]});
        parts[unit] = {all.mean, all.squares};
    }
    Part* to = partial + 1LL * blockIdx.x * (GROUPS * gridDim.y) + blockIdx.y * GROUPS;
    merge_threads(parts, here,
                  [&](int group, const Moments& found) { to[group] = {found.mean, found.squares}; });
}
