// The three Winograd stages of three consecutive chunks of tiles in one launch: the GEMMs of one chunk overlap the
// input transform of the next and the output transform of the previous.
//
// Transforms are limited by memory and GEMMs by arithmetic, so CTAs of both kinds on one SM fill each other's gaps. V
// and M have two small buffers each, which mostly stay in L2. Launches are ordered, so CTAs of one launch never wait
// for each other.
//
// Rung: `winograd_f4_pipelined`. Read winograd_stages.cuh (first and last stage), then winograd_gemm.cuh (the middle
// one).
#include "common/ptx.cuh"
#include "conv2d/winograd_stages.cuh"
#include "conv2d/winograd_gemm.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int BLOCKS_PER_SM = 3;  // config.blocks_per_sm
#endif

static_assert(STAGE_THREADS == GEMM_THREADS, "one launch, one block size");

struct Roles {  // filled by escalade/ops/conv2d/rungs/winograd.py, in this order
    int input_blocks, gemm_blocks, output_blocks;
    int channel_blocks, filter_blocks;  // of the input and output stage
};

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, BLOCKS_PER_SM)
    conv2d_winograd_pipelined(const Element* x, const Element* bias, const Element* residual, Element* y,
                              float* next_inputs, const float* inputs, const float* weights, float* products,
                              const float* last_products, ConvShape shape, TileGrid next_tiles, TileGrid last_tiles,
                              GemmShape gemm, Roles roles) {
    wait_for_previous_launch();
    extern __shared__ __align__(16) float slices[];
    // Spread the GEMM CTAs evenly over the launch.
    const long long all = roles.input_blocks + roles.gemm_blocks + roles.output_blocks;
    const int gemm_before = 1LL * blockIdx.x * roles.gemm_blocks / all;
    const int gemm_through = (blockIdx.x + 1LL) * roles.gemm_blocks / all;
    const int transform = blockIdx.x - gemm_before;
    if (gemm_through > gemm_before)
        gemm_stage(gemm_before, slices, inputs, weights, products, gemm);
    else if (transform < roles.output_blocks)
        output_stage(transform, roles.filter_blocks, last_products, bias, residual, y, shape, last_tiles);
    else
        input_stage(transform - roles.output_blocks, roles.channel_blocks, x, next_inputs, shape, next_tiles);
}
