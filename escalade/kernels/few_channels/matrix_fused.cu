// y[n][filter][oh][ow] = sum over c, r, s of x[n][c][oh - pad_h + r][ow - pad_w + s] * w[filter][c][r][s] + bias[filter]
//
// Unrolling, product and permutation in one kernel: the tile of the unrolled matrix is gathered from x as it is
// multiplied, and sums go to their place in y. One switch an idea:
//   RESTRICT             pointers are promised not to overlap
//   FILTER_HEIGHT, ...   the shape's own, or numbers that the compiler knows: then divisions by them are multiplications
//   UNROLL               how often the loops over a tile's words are unrolled
//   Product              float: operands rounded to TF32, m16n8k8; a 16-bit type: m16n8k16
// What bounds it: finding the place of each value, a dozen integer instructions for 16 multiply-adds.
//
// Rung           switches
//   fusion       none: RESTRICT empty, UNROLL 1, Product float
//   restrict     RESTRICT
//   unrolling    RESTRICT, UNROLL 16, FILTER_HEIGHT and FILTER_WIDTH known
//   half         the same, and Product of 16 bits
// Read on in matrix_tiles.cuh. shape.cuh has the sizes, and how the image is read.
#include "common/epilogue.cuh"
#include "few_channels/matrix_tiles.cuh"
#include "few_channels/shape.cuh"

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

    // A thread behind the last pixel takes the last one again: its sums are not stored.
    const long long pixel = min(first_pixel + threadIdx.x % TILE_PIXELS, pixels - 1);
    const Source* image = x + pixel / conv_pixels * CHANNELS * shape.height * shape.width;
    const int row = pixel % conv_pixels / shape.conv_width - shape.pad_h;
    const int column = pixel % conv_pixels % shape.conv_width - shape.pad_w;

    float sums[2][4] = {};
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
        multiply(sums, tiles);
        __syncthreads();
    }
    for_each_sum(sums, [&](int in_tile, int column_in_tile, float sum) {
        const int filter = first_filter + in_tile;
        const long long at = first_pixel + column_in_tile;
        if (filter >= shape.filters || at >= pixels) return;
        const long long n = at / conv_pixels;
        Element* target = y + n * shape.filters * conv_pixels;
        target[output_offset(filter, at - n * conv_pixels, shape.filters, conv_pixels)] =
            finish<HAS_BIAS, false, false, Element>(sum, bias, filter, nullptr, 0);
    });
}
