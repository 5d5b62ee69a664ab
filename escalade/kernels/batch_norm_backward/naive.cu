// y = weight[c] * rstd[c] * (g - mean of g - (x - mean[c]) * rstd[c] * mean of g * (x - mean[c]) * rstd[c])
//
// g is the gradient before the ReLU, if any. The foot of the ladder: one element per thread, each loading its channel's
// values. Limiter: instructions, including the divisions that compute the channel. y may be the gradient or x.
//
// Rung: `naive`. Read batch_norm_backward.cuh.
#include "batch_norm_backward/batch_norm_backward.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
#endif

extern "C" __global__ void batch_norm_backward_naive(const Element* gradient, const Element* x, const Element* output,
                                                     Channels all, Element* y, float share, int channels, int plane,
                                                     long long elements, Element* again) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    const Slope slope = all.slope(channel_of(static_cast<Index>(at), channels, plane), share);
    const Element own = x[at];
    y[at] = slope.of(gradient[at], own, MASK == BY_OUTPUT ? output[at] : Element());
    if (RECOMPUTES) again[at] = slope.again(own);
}
