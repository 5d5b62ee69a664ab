// parts[part][k][r][s] = sum over the part's pixels p of gradient[p][k] * x[window(p, r, s)][k]; for the bias, of
// gradient[p][k] alone
//
// Depthwise, NHWC. A thread owns VECTOR channels and one filter row, accumulated in registers. It walks along a row of
// outputs, with the inputs of FILTER_WIDTH taps in registers: an input is loaded once, and meets one tap after another.
// The loads of the next FILTER_WIDTH steps are in flight. Threads of the CTA with other filter rows, and those in
// adjacent output rows, hit L1. With dilation a walk visits every WALK-th column, where the same inputs recur. At the end,
// threads with the same channels and taps reduce in smem, in a fixed order. Rows are divided into parts, one per
// blockIdx.y.
// Limiter: instruction issue.
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
constexpr int COLUMNS = 2;        // config.columns: output columns per walk of a thread
constexpr int LANES = 6;          // config.lanes: threads per CTA along the channels
constexpr int THREADS = 180;      // config.threads(forward)
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int POSITIONS = THREADS / (LANES * FILTER_HEIGHT);  // rows that a CTA walks along at once
constexpr int BLOCK_CHANNELS = LANES * VECTOR;
static_assert(THREADS == LANES * FILTER_HEIGHT * POSITIONS, "no thread is idle");
using Numbers = Pack<Element, VECTOR>;

__device__ __forceinline__ bool is_between(int value, int end) {
    return static_cast<unsigned>(value) < static_cast<unsigned>(end);  // a negative value wraps to a large one
}

struct Accumulators {
    float of_taps[FILTER_WIDTH][VECTOR], of_bias[VECTOR];
};

__device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
constexpr int WALK = DILATION_W / gcd(STRIDE_W, DILATION_W);     // columns of a step
constexpr int ADVANCE = STRIDE_W / gcd(STRIDE_W, DILATION_W);    // taps from the inputs of a step to those of the next
constexpr int FRESH = ADVANCE < FILTER_WIDTH ? ADVANCE : FILTER_WIDTH;  // inputs that the step before did not meet

// A gradient, and its inputs that are not in registers yet: those of the last taps of the filter row.
struct Step {
    Numbers gradient, fresh[FRESH];
};

// A row of outputs, or a segment of it, for one filter row.
struct Walk {
    const Element *gradient, *x;  // of the next step: x at the first tap, which may be outside the image
    int column, steps;            // column of the first tap; steps that were not loaded yet
    bool inside;                  // the row of x is in the image

    __device__ __forceinline__ Walk(const Element* all_gradients, const Element* all_x, const ConvShape& shape, int number,
                                    int tap_row, int channel) {
        const int output_row = number % shape.output_height, first = number / shape.output_height % WALK;
        const int segments = ((shape.output_width + WALK - 1) / WALK + COLUMNS - 1) / COLUMNS;
        const int segment = number / shape.output_height / WALK % segments;
        const long long image = number / shape.output_height / WALK / segments;
        const int output_column = first + segment * COLUMNS * WALK;
        const long long output = (image * shape.output_height + output_row) * shape.output_width + output_column;
        const int row = output_row * STRIDE_H - shape.pad_h + tap_row * DILATION_H;
        steps = min(COLUMNS, (shape.output_width - output_column + WALK - 1) / WALK);
        inside = is_between(row, shape.height);
        column = output_column * STRIDE_W - shape.pad_w;
        gradient = all_gradients + output * shape.channels + channel;
        x = all_x + ((image * shape.height + row) * shape.width + column) * shape.channels + channel;
    }

    __device__ __forceinline__ Numbers input(int tap, const ConvShape& shape) const {
        return load_pack_if<Element, VECTOR>(steps > 0 && inside && is_between(column + tap * DILATION_W, shape.width),
                                             x + tap * DILATION_W * shape.channels);
    }

    __device__ __forceinline__ void load(Step& step, const ConvShape& shape) {
        step.gradient = load_pack_if<Element, VECTOR>(steps > 0, gradient);
#pragma unroll
        for (int n = 0; n < FRESH; ++n) step.fresh[n] = input(FILTER_WIDTH - FRESH + n, shape);
        gradient += WALK * shape.channels;
        x += WALK * STRIDE_W * shape.channels;
        column += WALK * STRIDE_W;
        --steps;
    }
};

// Inputs of a filter row's taps, in a ring: step t finds that of tap s at (t * ADVANCE + s) % FILTER_WIDTH.
using Window = float[FILTER_WIDTH][VECTOR];

__device__ __forceinline__ void keep(Window& window, int slot, const Numbers& input) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) window[slot][v] = to_float(input.at[v]);
}

__device__ __forceinline__ void multiply_add(Accumulators& acc, Window& window, const Step& step, int turn) {
#pragma unroll
    for (int n = 0; n < FRESH; ++n)
        keep(window, (turn * ADVANCE + FILTER_WIDTH - FRESH + n) % FILTER_WIDTH, step.fresh[n]);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        const float g = to_float(step.gradient.at[v]);
        if (HAS_BIAS) acc.of_bias[v] += g;
#pragma unroll
        for (int s = 0; s < FILTER_WIDTH; ++s) acc.of_taps[s][v] += g * window[(turn * ADVANCE + s) % FILTER_WIDTH][v];
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
            const int steps = walk.steps;
            Window window;
#pragma unroll
            for (int s = 0; s < FILTER_WIDTH - FRESH; ++s) keep(window, s, walk.input(s, shape));
            Step ahead[FILTER_WIDTH];
#pragma unroll
            for (int turn = 0; turn < FILTER_WIDTH; ++turn) walk.load(ahead[turn], shape);
#pragma unroll 1
            for (int step = 0; step < steps; step += FILTER_WIDTH)
#pragma unroll
                for (int turn = 0; turn < FILTER_WIDTH; ++turn) {
                    if (step + turn >= steps) break;
                    const Step now = ahead[turn];
                    walk.load(ahead[turn], shape);
                    multiply_add(acc, window, now, turn);
                }
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
