// M[point][tile][filter] = sum over channels of V[point][tile][channel] * U[point][channel][filter].
//
// Second of the three stages of a Winograd convolution: (TILE + 2)^2 GEMMs of one shape. Limiter: arithmetic from about
// 64 channels on, below that reading V and writing M.
//
// Rungs                                            switches
//   winograd_f2, winograd_f4, winograd_f4_blocked  none
//   winograd_f4_split                              SPLIT
// Continue in winograd_gemm.cuh.
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "conv2d/winograd_gemm.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int BLOCKS_PER_SM = 4;  // config.blocks_per_sm
#endif

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, BLOCKS_PER_SM)
    conv2d_winograd_gemm(const float* inputs, const float* weights, float* products, GemmShape shape) {
    wait_for_previous_launch();
    extern __shared__ __align__(16) float slices[];
    gemm_stage(blockIdx.x, slices, inputs, weights, products, shape);
}
