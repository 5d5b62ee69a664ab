// y[n][p][c] = activated((x[n][p][c] - mean) / sqrt(variance + epsilon) * weight[c] + bias[c])
//
// The CTAs of a cluster split the pixels of an image, `share` each, and hold them in registers: groups may exceed one
// CTA, and a CTA covers whole pixels. Each CTA stores its moments in its smem, where the others read them through
// DSMEM, in a fixed order. Limiter: memory, each element is read and written once.
//
// Rung: `clustered`. Read held.cuh (a CTA's registers), group_norm.cuh (groups of a CTA).
#include "common/hopper.cuh"
#include "group_norm/held.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    group_norm_clustered(const Element* x, const Parameter* weight, const Parameter* bias, Result* y, int pixels,
                         int x_pitch, int y_pitch, int share, float epsilon, float* mean, float* rstd) {
    __shared__ alignas(16) float4 of_block[GROUPS];
    __shared__ Statistic statistics[GROUPS];
    wait_for_previous_launch();
    const u32 blocks = cluster_size();
    const int image = blockIdx.x / blocks, begin = cluster_rank() * share, here = max(0, min(share, pixels - begin));
    const int channel = blockIdx.y * WIDTH * VECTOR;
    const long long first = 1LL * image * pixels + begin;
    const Held held(x + first * x_pitch + channel, here, x_pitch);
    Part parts[UNITS];
    held.measure(parts);
    merge_threads(parts, here, [&](int group, const Moments& found) {
        of_block[group] = float4{found.count, found.mean, found.squares, 0.f};
    });
    cluster_sync();
    merge_groups(
        static_cast<int>(blocks),
        [&](int group, int entry) {
            const float4 found = load_cluster(shared_address(of_block + group), entry);
            return Moments{found.x, found.y, found.z};
        },
        [&](int group, const Moments& found) {
            statistics[group] = statistic_of(found, epsilon);
            if (begin == 0) Statistics{mean, rstd}.write(image, group, statistics[group]);
        });
    __syncthreads();
    cluster_arrive();  // no more DSMEM reads from here on
    if (held.mine != 0) {
        const Channels channels(statistics, held.pack, channel + held.pack * VECTOR, weight, bias);
        held.store(y + first * y_pitch + channel, y_pitch, channels, Planes(image, weight, bias), begin);
    }
    cluster_wait();
}
