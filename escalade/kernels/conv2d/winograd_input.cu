// V[point][tile][channel] = (B' d B)[point], where d is the patch of x that the tile's outputs read.
//
// First of the three stages of a Winograd convolution. Each input is read (1 + 2/TILE)^2 times, mostly from the caches,
// and V is larger than x by the same factor. Limiter: memory.
//
// Rungs                                                  switches
//   winograd_f2                                          TILE 2
//   winograd_f4, winograd_f4_blocked, winograd_f4_split  TILE 4
// Continue in winograd_stages.cuh.
#include "common/ptx.cuh"
#include "conv2d/winograd_stages.cuh"

extern "C" __global__ void __launch_bounds__(STAGE_THREADS)
    conv2d_winograd_input(const Element* x, float* transformed, int channel_blocks, ConvShape shape, TileGrid tiles) {
    wait_for_previous_launch();
    input_stage(blockIdx.x, channel_blocks, x, transformed, shape, tiles);
}
