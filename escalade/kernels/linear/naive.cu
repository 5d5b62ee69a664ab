// y[row][output] = relu(sum over k of x[row][k] * weight[output][k] + bias[output])
//
// With PIXELS > 1, x[row][k] is the mean of x[row][pixel][k] over the pixels, rounded to Element.
//
// The foot of the ladder: one thread per output. The threads of a warp share a row of x and read 32 rows of weights,
// one element of each at a time. Limiter: two loads per multiply-add, mostly scattered words.
//
// Rung: `naive`. mlp launches it for the products of `layers`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr bool HAS_BIAS = true;   // problem.bias
constexpr bool HAS_RELU = false;  // problem.relu
constexpr int PIXELS = 1;         // problem.pixels
#endif

#include "common/epilogue.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void linear_naive(const Element* x, const Element* weight, const Element* bias, Element* y,
                                        int rows, int in_features, int out_features) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * rows * out_features) return;

    const int output = at % out_features;
    const Element* inputs = x + at / out_features * PIXELS * in_features;
    const Element* weights = weight + 1LL * output * in_features;
    float sum = 0.f;
    for (int k = 0; k < in_features; ++k) {
        float input = to_float(inputs[k]);
        for (int pixel = 1; pixel < PIXELS; ++pixel) input += to_float(inputs[1LL * pixel * in_features + k]);
        sum += to_float(from_float<Element>(input / PIXELS)) * to_float(weights[k]);
    }
    y[at] = finish<HAS_BIAS, false, HAS_RELU>(sum, bias, output, static_cast<const Element*>(nullptr), 0);
}
