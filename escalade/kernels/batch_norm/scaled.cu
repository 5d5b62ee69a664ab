// y = relu((x - mean[c]) * scale[c] + bias[c] + residual)
//
// One element per thread, with a precomputed scale. Limiter: the two divisions that compute the channel, and few bytes
// in flight. y may be x or the residual.
//
// Rung: `scaled`, also of `batch_norm_training`. Read batch_norm.cuh.
#include "batch_norm/batch_norm.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
#endif

extern "C" __global__ void batch_norm_scaled(const Element* x, const float* scale, const float* bias, const float* mean,
                                             const Element* residual, Element* y, int channels, int plane,
                                             long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    const int c = channel_of(static_cast<Index>(at), channels, plane);
    y[at] = normalized(x[at], mean[c], scale[c], bias[c], HAS_RESIDUAL ? residual[at] : Element());
}
