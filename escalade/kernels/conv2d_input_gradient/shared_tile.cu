// dx[n][h][w][c] = sum over k, r, s of dy[n][(h + pad - r*dilation) / stride][...][k] * w[k][r][s][c], where that
// divides
//
// The sum of direct.cu with both operands in smem. One CTA per tile of dx, TILE_ROWS x TILE_COLUMNS pixels of
// TILE_CHANNELS channels, one element per thread. For CHUNK filters at a time it stages
//   - the pixels of dy that the tile reads, reused by every tap and every channel of the tile,
//   - the weights from these filters to these channels, reused by every pixel of the tile.
// Global memory is then read once per tile instead of once per product. Positions outside dy are staged as zeros, so
// the multiply-adds need no bounds checks.
// Limiter: two smem loads per multiply-add, as each thread has only one accumulator.
//
// Rung: `shared_tile`. Read mask.cuh for the mask.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool NHWC = false;          // problem.layout == "nhwc"
constexpr bool HAS_MASK = true;       // problem.mask
constexpr bool HAS_BIAS = false;      // problem.forward.bias
constexpr bool HAS_RESIDUAL = false;  // problem.forward.residual
constexpr bool HAS_RELU = false;      // problem.forward.relu
constexpr int FILTER_HEIGHT = 3;      // forward.filter_height
constexpr int FILTER_WIDTH = 3;       // forward.filter_width
constexpr int STRIDE_H = 1;           // forward.stride[0]
constexpr int STRIDE_W = 1;           // forward.stride[1]
constexpr int DILATION_H = 1;         // forward.dilation[0]
constexpr int DILATION_W = 1;         // forward.dilation[1]
constexpr int TILE_ROWS = 4;          // config.rows
constexpr int TILE_COLUMNS = 16;      // config.columns
constexpr int TILE_CHANNELS = 4;      // config.channels
constexpr int CHUNK = 8;              // config.chunk: filters staged at a time
#endif

#include "common/epilogue.cuh"
#include "common/ptx.cuh"
#include "conv2d_input_gradient/mask.cuh"

constexpr int THREADS = TILE_ROWS * TILE_COLUMNS * TILE_CHANNELS;
constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int REACH_H = (FILTER_HEIGHT - 1) * DILATION_H, REACH_W = (FILTER_WIDTH - 1) * DILATION_W;
// The taps of a tile's pixels cover TILE_ROWS + REACH_H rows of x; dy has every STRIDE_H-th of them.
constexpr int GRADIENT_ROWS = (TILE_ROWS - 1 + REACH_H) / STRIDE_H + 1;
constexpr int GRADIENT_COLUMNS = (TILE_COLUMNS - 1 + REACH_W) / STRIDE_W + 1;
constexpr int GRADIENT_PIXELS = GRADIENT_ROWS * GRADIENT_COLUMNS;

// Both tiles keep the order of their tensors: adjacent threads copy adjacent elements.
__device__ __forceinline__ int image_offset(int channel, int pixel, int channels, int pixels) {
    return NHWC ? pixel * channels + channel : channel * pixels + pixel;
}
__device__ __forceinline__ int weight_offset(int filter, int channel, int tap, int channels) {
    return NHWC ? (filter * TAPS + tap) * channels + channel : (filter * channels + channel) * TAPS + tap;
}

// ceil(n / d) for any sign of n: C++ rounds a quotient toward zero.
__device__ __forceinline__ int ceil_div(int n, int d) { return n > 0 ? (n + d - 1) / d : n / d; }

// Stages CHUNK filters of dy, from the first row and column on.
__device__ __forceinline__ void stage_gradients(float* tile, const Element* image, const ConvShape& shape,
                                                int first_filter, int first_row, int first_column) {
    for (int at = threadIdx.x; at < CHUNK * GRADIENT_PIXELS; at += THREADS) {
        const int filter = first_filter + (NHWC ? at % CHUNK : at / GRADIENT_PIXELS);
        const int pixel = NHWC ? at / CHUNK : at % GRADIENT_PIXELS;
        const int row = first_row + pixel / GRADIENT_COLUMNS, column = first_column + pixel % GRADIENT_COLUMNS;
        const bool inside = filter < shape.filters && row >= 0 && row < shape.output_height && column >= 0 &&
                            column < shape.output_width;
        const int from = image_offset(filter, row * shape.output_width + column, shape.filters,
                                      shape.output_height * shape.output_width);
        tile[at] = inside ? to_float(image[from]) : 0.f;
    }
}

// Stages all taps from CHUNK filters to TILE_CHANNELS channels.
__device__ __forceinline__ void stage_weights(float* tile, const Element* weight, const ConvShape& shape,
                                              int first_filter, int first_channel) {
    for (int at = threadIdx.x; at < CHUNK * TILE_CHANNELS * TAPS; at += THREADS) {
        const int filter = first_filter + at / (TILE_CHANNELS * TAPS), rest = at % (TILE_CHANNELS * TAPS);
        const int channel = first_channel + (NHWC ? rest % TILE_CHANNELS : rest / TAPS);
        const int tap = NHWC ? rest / TILE_CHANNELS : rest % TAPS;
        const bool inside = filter < shape.filters && channel < shape.channels;
        tile[at] = inside ? to_float(weight[weight_offset(filter, channel, tap, shape.channels)]) : 0.f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_input_gradient_shared_tile(const Element* gradient, const Element* weight, const Element* aux,
                                      const Element* bias, Element* y, ConvShape shape) {
    __shared__ __align__(16) float gradients[CHUNK * GRADIENT_PIXELS];
    __shared__ __align__(16) float weights[CHUNK * TILE_CHANNELS * TAPS];
    wait_for_previous_launch();

    // CTAs that differ only in their channels are adjacent, so that they share dy in L2.
    const int channel_tiles = (shape.channels + TILE_CHANNELS - 1) / TILE_CHANNELS;
    const int column_tiles = (shape.width + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int row_tiles = (shape.height + TILE_ROWS - 1) / TILE_ROWS;
    const int pixel_tile = blockIdx.x / channel_tiles;
    const int first_channel = blockIdx.x % channel_tiles * TILE_CHANNELS;
    const int top = pixel_tile / column_tiles % row_tiles * TILE_ROWS, left = pixel_tile % column_tiles * TILE_COLUMNS;
    const long long image = pixel_tile / column_tiles / row_tiles;

    // The innermost index of the layout runs along threads, so that stores coalesce.
    const int tile_pixel = NHWC ? threadIdx.x / TILE_CHANNELS : threadIdx.x % (TILE_ROWS * TILE_COLUMNS);
    const int tile_channel = NHWC ? threadIdx.x % TILE_CHANNELS : threadIdx.x / (TILE_ROWS * TILE_COLUMNS);
    const int tile_row = tile_pixel / TILE_COLUMNS, tile_column = tile_pixel % TILE_COLUMNS;

    // The last tap reaches the first row of dy that the tile reads. If the stride skips the first rows that the tap
    // reaches, `skipped` counts them, in rows of x.
    const int reached_row = top + shape.pad_h - REACH_H, reached_column = left + shape.pad_w - REACH_W;
    const int gradient_row = ceil_div(reached_row, STRIDE_H), gradient_column = ceil_div(reached_column, STRIDE_W);
    const int skipped_rows = gradient_row * STRIDE_H - reached_row,
              skipped_columns = gradient_column * STRIDE_W - reached_column;

    const Element* gradient_image = gradient + image * shape.filters * shape.output_height * shape.output_width;
    float sum = 0.f;
    for (int first_filter = 0; first_filter < shape.filters; first_filter += CHUNK) {
        if (first_filter > 0) __syncthreads();  // the previous chunk has been used
        stage_gradients(gradients, gradient_image, shape, first_filter, gradient_row, gradient_column);
        stage_weights(weights, weight, shape, first_filter, first_channel);
        __syncthreads();
#pragma unroll 1
        for (int r = 0; r < FILTER_HEIGHT; ++r) {
            // Negative only if the stride skips it; then the remainder is nonzero too.
            const int row = tile_row + REACH_H - r * DILATION_H - skipped_rows;
            if (row % STRIDE_H != 0) continue;
#pragma unroll 8
            for (int s = 0; s < FILTER_WIDTH; ++s) {
                const int column = tile_column + REACH_W - s * DILATION_W - skipped_columns;
                if (column % STRIDE_W != 0) continue;
                const int pixel = row / STRIDE_H * GRADIENT_COLUMNS + column / STRIDE_W, tap = r * FILTER_WIDTH + s;
#pragma unroll
                for (int k = 0; k < CHUNK; ++k)
                    sum += gradients[image_offset(k, pixel, CHUNK, GRADIENT_PIXELS)] *
                           weights[weight_offset(k, tile_channel, tap, TILE_CHANNELS)];
            }
        }
    }

    const int channel = first_channel + tile_channel, row = top + tile_row, column = left + tile_column;
    if (channel >= shape.channels || row >= shape.height || column >= shape.width) return;
    const long long at = image * shape.channels * shape.height * shape.width +
                         image_offset(channel, row * shape.width + column, shape.channels, shape.height * shape.width);
    if (HAS_MASK) sum = masked(sum, aux[at]);
    y[at] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU, Element>(sum, bias, channel, aux, at);
}
