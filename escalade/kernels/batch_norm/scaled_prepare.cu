// scale[c] = weight[c] / sqrt(variance[c] + epsilon)
//
// The part that does not depend on x, once per channel. Limiter: the launch.
//
// Rung: `scaled`, also of `batch_norm_training`.
#include "common/ptx.cuh"

extern "C" __global__ void batch_norm_scaled_prepare(const float* weight, const float* variance, float* scale, float epsilon,
                                            int channels) {
    wait_for_previous_launch();
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < channels) scale[c] = weight[c] * rsqrtf(variance[c] + epsilon);
}
