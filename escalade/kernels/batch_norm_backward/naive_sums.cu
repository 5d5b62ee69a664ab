// bias_gradient[c] = sum of g, weight_gradient[c] = sum of g * (x - mean[c]) * rstd[c], over channel c
//
// g is the gradient before the ReLU, if any; with HAS_RESIDUAL it is also a result, the residual's gradient. The foot
// of the ladder: one CTA per channel, one element per access. Limiter: few loads in flight on as many SMs as there are
// channels; in NHWC also a warp's 32 elements in 32 sectors.
//
// Rung: `naive`. Read batch_norm_backward.cuh.
#include "batch_norm_backward/batch_norm_backward.cuh"
#include "common/block.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr int THREADS = 256;          // config.threads
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_backward_naive_sums(const Element* gradient, const Element* x, const Element* output,
                                   const float* weight, const float* bias, const float* mean, const float* rstd,
                                   Element* residual_gradient, float* weight_gradient, float* bias_gradient,
                                   int channels, int plane, long long count) {
    wait_for_previous_launch();
    const int c = blockIdx.x;
    const float middle = mean[c], scale = weight[c] * rstd[c], shift = MASK == BY_X ? bias[c] : 0.f;
    float sum = 0.f, products = 0.f;
    for (long long i = threadIdx.x; i < count; i += THREADS) {
        const long long image = i / plane;
        const long long at = NHWC ? i * channels + c : (image * channels + c) * plane + (i - image * plane);
        const float distance = to_float(x[at]) - middle;
        const float before = before_function(to_float(gradient[at]), distance, scale, shift,
                                             MASK == BY_OUTPUT ? output[at] : Element());
        if (HAS_RESIDUAL) residual_gradient[at] = from_float<Element>(before);
        sum += before;
        products += before * distance;
    }
    sum = block_sum<THREADS>(sum);
    products = block_sum<THREADS>(products);
    if (threadIdx.x == 0) bias_gradient[c] = sum, weight_gradient[c] = products * rstd[c];
}
