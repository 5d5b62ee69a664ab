// dx = sums, rounded; resets the sums to zero for the next call
//
// Rung: `atomics`: its sums are fp32, so that several 16-bit gradients are rounded once. Limiter: memory.
#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
#endif

extern "C" __global__ void max_pool2d_backward_atomics_finish(float* sums, Element* dx, long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    dx[at] = from_float<Element>(sums[at]);
    sums[at] = 0.f;
}
