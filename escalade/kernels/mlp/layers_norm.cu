// y[row] = (x[row] - its mean) / sqrt(its variance + epsilon) * weight + bias
//
// One thread per row, three passes. Adjacent threads are a row apart. Limiter: scattered loads.
//
// Rung: `layers`.
#include "common/elements.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void mlp_layers_norm(const Element* x, const Element* weight, const Element* bias, Element* y,
                                          long long rows, int features, float epsilon) {
    wait_for_previous_launch();
    const long long row = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;

    const Element* from = x + row * features;
    float sum = 0.f, squares = 0.f;
    for (int f = 0; f < features; ++f) sum += to_float(from[f]);
    const float mean = sum / features;
    for (int f = 0; f < features; ++f) {
        const float distance = to_float(from[f]) - mean;
        squares += distance * distance;
    }
    const float scale = rsqrtf(squares / features + epsilon);
    for (int f = 0; f < features; ++f) {
        const float value = (to_float(from[f]) - mean) * scale;
        y[row * features + f] = from_float<Element>(value * to_float(weight[f]) + to_float(bias[f]));
    }
}
