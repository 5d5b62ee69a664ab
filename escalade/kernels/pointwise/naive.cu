// y[i] = clip(x[i] + residual[i])
//
// The foot of the ladder: an element a thread. What bounds it: how few bytes are on their way at a time, one small
// load a thread; in fp16 not enough to keep the memory busy. y may be x or the residual.
//
// Serves `naive` of relu (HAS_RELU, HAS_LIMIT) and of add (HAS_RESIDUAL). pointwise.cuh has what becomes of an element.
#include "common/ptx.cuh"
#include "pointwise/pointwise.cuh"

extern "C" __global__ void pointwise_naive(const Element* x, const Element* residual, Element* y, float limit,
                                           long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    y[at] = pointwise(x[at], HAS_RESIDUAL ? residual[at] : Element(), limit);
}
