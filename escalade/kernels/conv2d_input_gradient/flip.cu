// flipped[c][r'][s'][k] = w[k][first_r + (taps_h - 1 - r')*step_h][first_s + (taps_w - 1 - s')*step_w][c]      (NHWC)
// flipped[c][k][r'][s'] = w[k][c][...][...]                                                                  (NCHW)
//
// The filter whose convolution with dy is the gradient of x: channels and filters transposed, taps reversed; for a
// strided convolution only the taps of one sub-pixel phase. A CTA transposes 32 x 32 channels and filters of one tap
// through smem, so that both sides access contiguous memory in NHWC.
// Limiter: memory, and at these sizes the launch.
//
// Rungs: `implicit_gemm`, `tensor_core`, `tensor_core_split`, `tma_wgmma`, `persistent`, `one_launch`,
// `streamed_window` and `wgmma_split`: every rung whose kernel does not take MN-major weights.
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // forward.dtype
constexpr bool NHWC = false;  // forward.layout == "nhwc"
constexpr int ROWS = 8;       // rows
#endif

constexpr int TILE = 32;

struct SubFilter {  // filled by escalade/ops/conv2d_input_gradient/rungs/phases.py, in this order
    int filters, channels, filter_height, filter_width;
    int first_r, first_s, step_h, step_w, taps_h, taps_w;
};

extern "C" __global__ void conv2d_input_gradient_flip(const Element* weight, Element* flipped, SubFilter sub) {
    wait_for_previous_launch();
    __shared__ __align__(4) unsigned char shared_memory[TILE * (TILE + 1) * sizeof(Element)];
    auto tile = reinterpret_cast<Element(*)[TILE + 1]>(shared_memory);
    const int taps = sub.filter_height * sub.filter_width, sub_taps = sub.taps_h * sub.taps_w;
    const int tiles_c = (sub.channels + TILE - 1) / TILE, tiles_k = (sub.filters + TILE - 1) / TILE;
    const int first_c = blockIdx.x % tiles_c * TILE, first_k = blockIdx.x / tiles_c % tiles_k * TILE;
    const int sub_tap = blockIdx.x / tiles_c / tiles_k;
    const int r = sub.first_r + (sub.taps_h - 1 - sub_tap / sub.taps_w) * sub.step_h;
    const int s = sub.first_s + (sub.taps_w - 1 - sub_tap % sub.taps_w) * sub.step_w;
    const int tap = r * sub.filter_width + s;
#pragma unroll
    for (int row = threadIdx.y; row < TILE; row += ROWS) {
        const int k = first_k + row, c = first_c + threadIdx.x;
        if (k < sub.filters && c < sub.channels)
            tile[row][threadIdx.x] = weight[NHWC ? (k * taps + tap) * sub.channels + c : (k * sub.channels + c) * taps + tap];
    }
    __syncthreads();
#pragma unroll
    for (int row = threadIdx.y; row < TILE; row += ROWS) {
        const int c = first_c + row, k = first_k + threadIdx.x;
        if (k < sub.filters && c < sub.channels)
            flipped[NHWC ? (c * sub_taps + sub_tap) * sub.filters + k : (c * sub.filters + k) * sub_taps + sub_tap] =
                tile[threadIdx.x][row];
    }
}
