// y of a tile = A' M A with M[point] = products[point][tile][filter]; then bias, residual and ReLU.
//
// Last of the three stages of a Winograd convolution. Limiter: memory.
//
// Rungs                                                  switches
//   winograd_f2                                          TILE 2
//   winograd_f4, winograd_f4_blocked, winograd_f4_split  TILE 4
// Continue in winograd_stages.cuh.
#include "common/ptx.cuh"
#include "conv2d/winograd_stages.cuh"

extern "C" __global__ void __launch_bounds__(STAGE_THREADS)
    conv2d_winograd_output(const float* products, const Element* bias, const Element* residual, Element* y,
                           int filter_blocks, ConvShape shape, TileGrid tiles) {
    wait_for_previous_launch();
    output_stage(blockIdx.x, filter_blocks, products, bias, residual, y, shape, tiles);
}
