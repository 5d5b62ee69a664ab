// y[i] = activation(y[i]), one thread per element. Limiter: memory.
//
// Rung: `layers`. Read activation.cuh.
#include "common/ptx.cuh"
#include "mlp/activation.cuh"

extern "C" __global__ void mlp_layers_activate(Element* y, long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at < elements) y[at] = from_float<Element>(activate<ACTIVATION>(to_float(y[at])));
}
