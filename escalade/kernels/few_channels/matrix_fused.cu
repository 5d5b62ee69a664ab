// y[n][filter][oh][ow] = sum over c, r, s of x[n][c][oh - pad_h + r][ow - pad_w + s] * w[filter][c][r][s] +
// bias[filter]
//
// Unrolling, GEMM and permutation in one kernel: tiles of the unrolled matrix are gathered from x as they are needed,
// and sums are stored directly to y. One switch per idea:
//   RESTRICT             __restrict__ pointers
//   FILTER_HEIGHT, ...   the shape's fields, or compile-time constants: then divisions by them become multiplications
//   UNROLL               unroll factor of the loops over a tile's words
//   Product              float: operands rounded to TF32, m16n8k8; a 16-bit type: m16n8k16
// Limiter: address computation, a dozen integer instructions per 16 multiply-adds.
//
// Rung           switches
//   fusion       none: RESTRICT empty, UNROLL 1, Product float
//   restrict     RESTRICT
//   unrolling    RESTRICT, UNROLL 16, constant FILTER_HEIGHT and FILTER_WIDTH
//   half         the same, and 16-bit Product
// Continue in matrix_tiles.cuh; shape.cuh has sizes and image access.
#include "common/epilogue.cuh"
#include "few_channels/matrix_tiles.cuh"
#include "few_channels/shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool HAS_BIAS = false;           // problem.bias
#define RESTRICT                           // "__restrict__" if rung.restrict else ""
#define FILTER_HEIGHT shape.filter_height  // problem.filter_height if rung.unrolled else "shape.filter_height"
#define FILTER_WIDTH shape.filter_width    // problem.filter_width if rung.unrolled else "shape.filter_width"
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    few_channels_matrix_fused(const Source* RESTRICT x, const Element* RESTRICT weight, const Element* RESTRICT bias,
                              Element* RESTRICT y, FewChannelsShape shape) {
    wait_for_previous_launch();
    __shared__ Tiles tiles;
    const int first_filter = blockIdx.y * TILE_FILTERS;
    const int conv_pixels = shape.conv_height * shape.conv_width;
    const long long pixels = 1LL * shape.batch * conv_pixels;
    const long long first_pixel = 1LL * blockIdx.x * TILE_PIXELS;
    const int depth = CHANNELS * FILTER_HEIGHT * FILTER_WIDTH;

    // A thread past the last pixel repeats it: its sums are not stored.
    const long long pixel = min(first_pixel + threadIdx.x % TILE_PIXELS, pixels - 1);
    const Source* image = x + pixel / conv_pixels * CHANNELS * shape.height * shape.width;
    const int row = pixel % conv_pixels / shape.conv_width - shape.pad_h;
    const int column = pixel % conv_pixels % shape.conv_width - shape.pad_w;

    float acc[2][4] = {};
    for (int first = 0; first < depth; first += TILE_DEPTH) {
        fill(
            tiles,
            [&](int filter, int k) {
                const bool inside = first_filter + filter < shape.filters && first + k < depth;
                return inside ? to_float(weight[(first_filter + filter) * depth + first + k]) : 0.f;
            },
            [&](int k) {
                const int tap = (first + k) % (FILTER_HEIGHT * FILTER_WIDTH);
                if (first + k >= depth) return 0.f;
                return pixel_at(image, (first + k) / (FILTER_HEIGHT * FILTER_WIDTH), row + tap / FILTER_WIDTH,
                                column + tap % FILTER_WIDTH, shape);
            });
        __syncthreads();
        multiply(acc, tiles);
        __syncthreads();
    }
    for_each_accumulator(acc, [&](int in_tile, int column_in_tile, float sum) {
        const int filter = first_filter + in_tile;
        const long long at = first_pixel + column_in_tile;
        if (filter >= shape.filters || at >= pixels) return;
        const long long n = at / conv_pixels;
        Element* target = y + n * shape.filters * conv_pixels;
        target[output_offset(filter, at - n * conv_pixels, shape.filters, conv_pixels)] =
            finish<HAS_BIAS, false, false, Element>(sum, bias, filter, nullptr, 0);
    });
}
