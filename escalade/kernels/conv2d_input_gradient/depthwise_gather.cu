// dx[n][h][w][c] = sum over r, s of dy[n][(h + pad - r*dilation) / stride][...][c] * w[c][r][s], where that divides
//
// Depthwise, NHWC. A thread computes a cell of dx, stride x stride pixels of VECTOR channels: whatever the pixel's phase,
// the taps that meet it read dy near the same place, so the WINDOW of dy that a cell meets is loaded once, into
// registers. Which tap meets which pixel is known when the kernel is compiled. Neighboring cells hit L1. The filters of
// the CTA's channels wait in smem, one CTA after another cell.
// Limiter: memory.
//
// Rung: `depthwise_gather`.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool HAS_MASK = true;       // problem.mask
constexpr bool HAS_BIAS = false;      // problem.forward.bias
constexpr bool HAS_RESIDUAL = false;  // problem.forward.residual
constexpr bool HAS_RELU = false;      // problem.forward.relu
constexpr int FILTER_HEIGHT = 3;      // forward.filter_height
constexpr int FILTER_WIDTH = 3;       // forward.filter_width
constexpr int STRIDE_H = 2;           // forward.stride[0]
constexpr int STRIDE_W = 2;           // forward.stride[1]
constexpr int PAD_H = 1;              // forward.padding[0]
constexpr int PAD_W = 1;              // forward.padding[1]
constexpr int DILATION_H = 1;         // forward.dilation[0]
constexpr int DILATION_W = 1;         // forward.dilation[1]
constexpr int VECTOR = 4;             // config.vector: channels per thread
constexpr int LANES = 6;              // config.lanes: threads per CTA along the channels
constexpr int THREADS = 180;          // config.threads
#endif

#include "common/elements.cuh"
#include "common/epilogue.cuh"
#include "common/ptx.cuh"
#include "conv2d_input_gradient/mask.cuh"

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int POSITIONS = THREADS / LANES;  // cells that a CTA computes at once
constexpr int BLOCK_CHANNELS = LANES * VECTOR;
static_assert(THREADS == LANES * POSITIONS, "no thread is idle");
using Numbers = Pack<Element, VECTOR>;

// The taps of one dimension. Pixel `phase` of cell i meets tap t in row i + offset(phase, t) of dy, if meets(phase, t).
template <int STRIDE, int PAD, int DILATION, int COUNT>
struct Axis {
    __device__ static constexpr int floor_div(int a) { return a >= 0 ? a / STRIDE : -((-a + STRIDE - 1) / STRIDE); }
    __device__ static constexpr bool meets(int phase, int tap) { return (phase + PAD - tap * DILATION) % STRIDE == 0; }
    __device__ static constexpr int offset(int phase, int tap) { return floor_div(phase + PAD - tap * DILATION); }
    static constexpr int FIRST = floor_div(PAD - (COUNT - 1) * DILATION + STRIDE - 1);  // the least offset, rounded up
    static constexpr int WINDOW = floor_div(STRIDE - 1 + PAD) - FIRST + 1;
};
using Rows = Axis<STRIDE_H, PAD_H, DILATION_H, FILTER_HEIGHT>;
using Columns = Axis<STRIDE_W, PAD_W, DILATION_W, FILTER_WIDTH>;

__device__ __forceinline__ bool is_between(int value, int end) {
    return static_cast<unsigned>(value) < static_cast<unsigned>(end);  // a negative value wraps to a large one
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_input_gradient_depthwise_gather(const Element* __restrict__ gradient, const Element* __restrict__ weight,
                                           const Element* __restrict__ aux, const Element* __restrict__ bias,
                                           Element* __restrict__ y, ConvShape shape, int cells, int part_cells) {
    __shared__ __align__(16) unsigned char shared_memory[TAPS * BLOCK_CHANNELS * sizeof(Element)];
    auto filters = reinterpret_cast<Element(*)[BLOCK_CHANNELS]>(shared_memory);
    wait_for_previous_launch();
    const int first_channel = blockIdx.y * BLOCK_CHANNELS, lane = threadIdx.x % LANES * VECTOR;
    for (int at = threadIdx.x; at < TAPS * BLOCK_CHANNELS; at += THREADS) {
        const int c = at / TAPS, tap = at % TAPS;
        filters[tap][c] = first_channel + c < shape.channels ? weight[1LL * (first_channel + c) * TAPS + tap]
                                                             : from_float<Element>(0.f);
    }
    __syncthreads();

    const int channel = first_channel + lane;
    const int cell_rows = (shape.height + STRIDE_H - 1) / STRIDE_H, cell_columns = (shape.width + STRIDE_W - 1) / STRIDE_W;
    const int first = blockIdx.x * part_cells, end = min(cells, first + part_cells);
    if (channel >= shape.channels) return;
    for (int number = first + threadIdx.x / LANES; number < end; number += POSITIONS) {
        const int cell_column = number % cell_columns, cell_row = number / cell_columns % cell_rows;
        const long long image = number / cell_columns / cell_rows;
        const int row = cell_row + Rows::FIRST, column = cell_column + Columns::FIRST;  // of dy, at the window's corner
        const Element* corner =
            gradient + ((image * shape.output_height + row) * shape.output_width + column) * shape.channels + channel;
        Numbers window[Rows::WINDOW][Columns::WINDOW];
#pragma unroll
        for (int i = 0; i < Rows::WINDOW; ++i)
#pragma unroll
            for (int j = 0; j < Columns::WINDOW; ++j)
                window[i][j] = load_pack_if<Element, VECTOR>(
                    is_between(row + i, shape.output_height) && is_between(column + j, shape.output_width),
                    corner + (1LL * i * shape.output_width + j) * shape.channels);
#pragma unroll
        for (int a = 0; a < STRIDE_H; ++a)
#pragma unroll
            for (int b = 0; b < STRIDE_W; ++b) {
                const int h = cell_row * STRIDE_H + a, w = cell_column * STRIDE_W + b;
                float sums[VECTOR] = {};
#pragma unroll
                for (int r = 0; r < FILTER_HEIGHT; ++r)
#pragma unroll
                    for (int s = 0; s < FILTER_WIDTH; ++s) {
                        if (!Rows::meets(a, r) || !Columns::meets(b, s)) continue;
                        const Numbers filter = load_pack<Element, VECTOR>(&filters[r * FILTER_WIDTH + s][lane]);
                        const Numbers& met = window[Rows::offset(a, r) - Rows::FIRST][Columns::offset(b, s) - Columns::FIRST];
#pragma unroll
                        for (int v = 0; v < VECTOR; ++v) sums[v] += to_float(met.at[v]) * to_float(filter.at[v]);
                    }
                if (h >= shape.height || w >= shape.width) continue;
                const long long at = ((image * shape.height + h) * shape.width + w) * shape.channels + channel;
                Numbers result;
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    if (HAS_MASK) sums[v] = masked(sums[v], aux[at + v]);
                    result.at[v] =
                        finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU, Element>(sums[v], bias, channel + v, aux, at + v);
                }
                store_pack<Element, VECTOR>(y + at, result);
            }
    }
}
