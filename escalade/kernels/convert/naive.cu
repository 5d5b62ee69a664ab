// y[n][c][pixel] = x[n][c][pixel] * scale[c] + shift[c], 0 for c >= channels; x and y each in NCHW or NHWC
// With WAYS > 1 the channels of x are interleaved: x[n][c / WAYS + c % WAYS * step] replaces x[n][c].
//
// The foot of the ladder: one thread per element of y, in y's order. Stores coalesce; if the layouts differ, the loads
// of a warp touch 32 different sectors. Limiter: those sectors, and the divisions that compute a position.
//
// Rung: `naive`. Read convert.cuh (element types, normalization).
#include "convert/convert.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool PITCHED = false;  // problem.y_pitch > 0
constexpr int WAYS = 1;          // problem.ways
#endif

struct Shape {
    int batch, channels, stored_channels, padded_channels, pixels, y_pitch, step;
};

extern "C" __global__ void convert_naive(const Source* x, const float* scale, const float* shift, Target* y,
                                         Shape shape) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * shape.batch * shape.padded_channels * shape.pixels) return;

    long long rest = at;
    int channel, pixel;
    if (TARGET_NHWC) {
        channel = rest % shape.padded_channels, rest /= shape.padded_channels;
        pixel = rest % shape.pixels, rest /= shape.pixels;
    } else {
        pixel = rest % shape.pixels, rest /= shape.pixels;
        channel = rest % shape.padded_channels, rest /= shape.padded_channels;
    }
    float value = 0.f;
    if (channel < shape.channels) {
        const int from = WAYS > 1 ? channel / WAYS + channel % WAYS * shape.step : channel;
        const int in_image = SOURCE_NHWC ? pixel * shape.stored_channels + from : from * shape.pixels + pixel;
        value = to_float(x[rest * shape.stored_channels * shape.pixels + in_image]);
        value = normalized(value, scale, shift, channel);
    }
    const long long place = PITCHED ? (rest * shape.pixels + pixel) * shape.y_pitch + channel : at;
    y[place] = from_float<Target>(value);
}
