// y[n][p][c] = activated((x[n][p][c] - mean) / sqrt(variance + epsilon) * weight[c] + bias[c])
//
// A CTA holds one or a few adjacent groups of an image in registers. Each thread computes the mean and squared
// deviations of its elements; these are merged through smem. Limiter: memory, each element is read and written once.
//
// Rung: `in_registers`. Read held.cuh (a CTA's registers), group_norm.cuh (groups of a CTA).
#include "group_norm/held.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    group_norm_in_registers(const Element* x, const Parameter* weight, const Parameter* bias, Result* y, int pixels,
                            int x_pitch, int y_pitch, float epsilon, float* mean, float* rstd) {
    __shared__ Statistic statistics[GROUPS];
    wait_for_previous_launch();
    const int channel = blockIdx.y * WIDTH * VECTOR;
    const long long image = 1LL * blockIdx.x * pixels;
    const Held held(x + image * x_pitch + channel, pixels, x_pitch);
    Part parts[UNITS];
    held.measure(parts);
    merge_threads(parts, pixels, [&](int group, const Moments& found) {
        statistics[group] = statistic_of(found, epsilon);
        Statistics{mean, rstd}.write(blockIdx.x, group, statistics[group]);
    });
    __syncthreads();
    if (held.mine == 0) return;
    const Channels channels(statistics, held.pack, channel + held.pack * VECTOR, weight, bias);
    held.store(y + image * y_pitch + channel, y_pitch, channels, Planes(blockIdx.x, weight, bias), 0);
}
