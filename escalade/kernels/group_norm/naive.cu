// y[n][p][c] = activated((x[n][p][c] - mean) / sqrt(variance + epsilon) * weight[c] + bias[c])
//
// mean and variance are over the channels of c's group in all pixels p of image n; planes.cuh has the view of NCHW. The
// foot of the ladder: one CTA per group of an image, in three passes: mean, variance, results. Limiter: single-element
// loads; a group's elements are scattered.
//
// Rung: `naive`.
#include "common/block.cuh"
#include "common/ptx.cuh"
#include "group_norm/planes.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int THREADS = 256;  // config.threads
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    group_norm_naive(const Element* x, const Parameter* weight, const Parameter* bias, Result* y, int groups,
                     int group_channels, int pixels, int x_pitch, int y_pitch, float epsilon, float* mean_of,
                     float* rstd_of) {
    wait_for_previous_launch();
    const int image = blockIdx.x / groups, first = (blockIdx.x - image * groups) * group_channels;
    const int count = pixels * group_channels;
    const Element* from = x + 1LL * image * pixels * x_pitch + first;
    Result* to = y + 1LL * image * pixels * y_pitch + first;
    float sum = 0.f, squares = 0.f;
    for (int at = threadIdx.x; at < count; at += THREADS)
        sum += to_float(from[1LL * (at / group_channels) * x_pitch + at % group_channels]);
    const float mean = block_sum<THREADS>(sum) / count;
    for (int at = threadIdx.x; at < count; at += THREADS) {
        const float distance = to_float(from[1LL * (at / group_channels) * x_pitch + at % group_channels]) - mean;
        squares += distance * distance;
    }
    const float scale = rsqrtf(block_sum<THREADS>(squares) / count + epsilon);
    if (HAS_STATISTICS && threadIdx.x == 0) mean_of[blockIdx.x] = mean, rstd_of[blockIdx.x] = scale;
    const Planes planes(image, weight, bias);
    for (int at = threadIdx.x; at < count; at += THREADS) {
        const int pixel = at / group_channels, channel = at % group_channels;
        float value = (to_float(from[1LL * pixel * x_pitch + channel]) - mean) * scale;
        if (PLANE) value = planes.scaled(value, at);
        if (HAS_WEIGHT && !PLANE) value *= to_float(weight[first + channel]);
        if (HAS_BIAS && !PLANE) value += to_float(bias[first + channel]);
        to[1LL * pixel * y_pitch + channel] = from_float<Result>(activated<HAS_RELU>(value));
    }
}
