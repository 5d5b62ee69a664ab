// error[row] = mean over its features of (reconstruction - x)^2, one thread per row. Limiter: scattered loads.
//
// Rung: `layers`.
#include "common/elements.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void mlp_layers_error(const Element* x, const Element* reconstruction, float* error, int rows,
                                     int features) {
    wait_for_previous_launch();
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;

    float squares = 0.f;
    for (int f = 0; f < features; ++f) {
        const float distance = to_float(reconstruction[1LL * row * features + f]) - to_float(x[1LL * row * features + f]);
        squares += distance * distance;
    }
    error[row] = squares / features;
}
