// dx = sums, rounded, and the sums left at zero for the next call
//
// Serves `atomics`: its sums are in fp32, so that several of 16 bits are rounded once. What bounds it: memory.
#include "common/elements.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void max_pool2d_backward_atomics_finish(float* sums, Element* dx, long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    dx[at] = from_float<Element>(sums[at]);
    sums[at] = 0.f;
}
