// parts[part][k][r][s] = sum over the part's pixels p of gradient[p][k] * x[window(p, r, s)][k]; for the bias, of
// gradient[p][k] alone
//
// Depthwise, NHWC. A thread owns VECTOR channels and one filter row, accumulated in registers. It walks down ROWS
// output rows of one column after another, with the next step's loads in flight. Threads of the CTA with other filter
// rows read the same gradients, and the rows of x of the previous step; these and adjacent columns hit in L1. At the
// end, threads with the same channels and taps reduce in smem, in a fixed order. Columns are divided into parts, one
// per blockIdx.y.
// Limiter: memory; from 5x5 on, instruction issue.
//
// Rung: `depthwise`.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr bool HAS_BIAS = true;   // problem.bias
constexpr int FILTER_HEIGHT = 3;  // forward.filter_height
constexpr int FILTER_WIDTH = 3;   // forward.filter_width
constexpr int STRIDE_H = 1;       // forward.stride[0]
constexpr int STRIDE_W = 1;       // forward.stride[1]
constexpr int DILATION_H = 1;     // forward.dilation[0]
constexpr int DILATION_W = 1;     // forward.dilation[1]
constexpr int VECTOR = 4;         // config.vector: channels per thread
constexpr int ROWS = 2;           // config.rows: output rows per walk of a thread
constexpr int LANES = 6;          // config.lanes: threads per CTA along the channels
constexpr int THREADS = 180;      // config.threads(forward)
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int POSITIONS = THREADS / (LANES * FILTER_HEIGHT);  // columns that a CTA walks down at once
constexpr int BLOCK_CHANNELS = LANES * VECTOR;
static_assert(THREADS == LANES * FILTER_HEIGHT * POSITIONS, "no thread is idle");
using Numbers = Pack<Element, VECTOR>;

__device__ __forceinline__ bool is_between(int value, int end) {
    return static_cast<unsigned>(value) < static_cast<unsigned>(end);  // a negative value wraps to a large one
}

struct Accumulators {
    float of_taps[FILTER_WIDTH][VECTOR], of_bias[VECTOR];
};

// A gradient, and the inputs of one filter row for it.
struct Step {
    Numbers gradient, window[FILTER_WIDTH];
};

// A column of outputs, for one filter row; steps go down.
struct Walk {
    const Element *gradient, *x;  // of the next step: x at the first tap, which may be outside the image
    int row, column, steps;

    __device__ __forceinline__ Walk(const Element* all_gradients, const Element* all_x, const ConvShape& shape, int number,
                                    int tap_row, int channel) {
        const int segments = (shape.output_height + ROWS - 1) / ROWS;
        const int output_column = number % shape.output_width, output_row = number / shape.output_width % segments * ROWS;
        const long long image = number / shape.output_width / segments;
        const long long output = (image * shape.output_height + output_row) * shape.output_width + output_column;
        steps = min(ROWS, shape.output_height - output_row);
        row = output_row * STRIDE_H - shape.pad_h + tap_row * DILATION_H;
        column = output_column * STRIDE_W - shape.pad_w;
        gradient = all_gradients + output * shape.channels + channel;
        x = all_x + ((image * shape.height + row) * shape.width + column) * shape.channels + channel;
    }

    __device__ __forceinline__ void load(Step& step, const ConvShape& shape) {
        step.gradient = load_pack<Element, VECTOR>(gradient);
        const bool inside = is_between(row, shape.height);
#pragma unroll
        for (int s = 0; s < FILTER_WIDTH; ++s)
            step.window[s] = load_pack_if<Element, VECTOR>(inside && is_between(column + s * DILATION_W, shape.width),
                                                           x + s * DILATION_W * shape.channels);
        gradient += shape.output_width * shape.channels;
        x += 1LL * STRIDE_H * shape.width * shape.channels;
        row += STRIDE_H;
    }
};

__device__ __forceinline__ void multiply_add(Accumulators& acc, const Step& step) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        const float g = to_float(step.gradient.at[v]);
        if (HAS_BIAS) acc.of_bias[v] += g;
#pragma unroll
        for (int s = 0; s < FILTER_WIDTH; ++s) acc.of_taps[s][v] += g * to_float(step.window[s].at[v]);
    }
}

// Reduces the sums of a CTA's positions in order, and stores them to the part.
__device__ __forceinline__ void add_up(const float (&acc)[VECTOR], float* scratch, float* part, int channels,
                                       int tap_rows, int pitch, int row_pitch) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) scratch[threadIdx.x * VECTOR + v] = acc[v];
    __syncthreads();
    for (int at = threadIdx.x; at < tap_rows * BLOCK_CHANNELS; at += THREADS) {
        const int channel = at % BLOCK_CHANNELS, tap_row = at / BLOCK_CHANNELS;
        if (channel >= channels) continue;
        float sum = scratch[at];
#pragma unroll
        for (int position = 1; position < POSITIONS; ++position)
            sum += scratch[position * FILTER_HEIGHT * BLOCK_CHANNELS + at];
        part[1LL * channel * pitch + tap_row * row_pitch] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_weight_gradient_depthwise(const Element* __restrict__ x, const Element* __restrict__ gradient,
                                     float* __restrict__ parts, ConvShape shape, int walks, int part_walks) {
    __shared__ float scratch[THREADS * VECTOR];  // [position][filter row][channel]
    wait_for_previous_launch();
    const int first_channel = blockIdx.x * BLOCK_CHANNELS, channel = first_channel + threadIdx.x % LANES * VECTOR;
    const int tap_row = threadIdx.x / LANES % FILTER_HEIGHT, position = threadIdx.x / LANES / FILTER_HEIGHT;
    const int first = blockIdx.y * part_walks, end = min(walks, first + part_walks);
    Accumulators acc = {};
    if (channel < shape.channels)
        for (int number = first + position; number < end; number += POSITIONS) {
            Walk walk(gradient, x, shape, number, tap_row, channel);
            Step next;
            walk.load(next, shape);
#pragma unroll 1
            for (int i = 1; i < walk.steps; ++i) {
                const Step now = next;
                walk.load(next, shape);
                multiply_add(acc, now);
            }
            multiply_add(acc, next);
        }
    const int channels = min(BLOCK_CHANNELS, shape.channels - first_channel);
    float* part = parts + 1LL * blockIdx.y * shape.channels * (TAPS + HAS_BIAS);
#pragma unroll
    for (int s = 0; s < FILTER_WIDTH; ++s)
        add_up(acc.of_taps[s], scratch, part + 1LL * first_channel * TAPS + s, channels, FILTER_HEIGHT, TAPS,
               FILTER_WIDTH);
    if (HAS_BIAS)  // of one filter row: all read the same gradients
        add_up(acc.of_bias, scratch, part + 1LL * shape.channels * TAPS + first_channel, channels, 1, 1, 0);
}
