// y = relu((x - mean[c]) / sqrt(variance[c] + epsilon) * weight[c] + bias[c] + residual)
//
// The foot of the ladder: one element per thread, each with its own square root, division and loads of its channel's
// four values. Limiter: instructions, about eighty per element. y may be x or the residual.
//
// Rung: `naive`, also of `batch_norm_training`. Read batch_norm.cuh.
#include "batch_norm/batch_norm.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
#endif

extern "C" __global__ void batch_norm_naive(const Element* x, const float* weight, const float* bias, const float* mean,
                                            const float* variance, const Element* residual, Element* y, float epsilon,
                                            int channels, int plane, long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    const int c = channel_of(static_cast<Index>(at), channels, plane);
    float value = (to_float(x[at]) - mean[c]) / sqrtf(variance[c] + epsilon) * weight[c] + bias[c];
    y[at] = from_float<Element>(
        activated<HAS_RESIDUAL, HAS_RELU>(value, HAS_RESIDUAL ? to_float(residual[at]) : 0.f));
}
