// y = sums, weights first, then the bias gradient (which may not be requested); resets the sums to zero for the next
// call
//
// Limiter: the launch.
//
// Rung: `atomics`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void conv2d_weight_gradient_atomics_finish(float* sums, Element* y, Element* bias_gradient,
                                                                 long long weights, long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    if (at < weights)
        y[at] = from_float<Element>(sums[at]);
    else if (bias_gradient != nullptr)
        bias_gradient[at - weights] = from_float<Element>(sums[at]);
    sums[at] = 0.f;
}
