// parts[part][k][r][s] = sum over the part's pixels p of gradient[p][k] * x[window(p, r, s)][k]; for the bias, of
// gradient[p][k] alone
//
// A filter for every channel, in NHWC: few products for each byte, so what bounds it is memory, and from 5x5 on the
// multiply-adds of CUDA cores. A thread owns VECTOR channels, with a sum for each of their taps in registers, and walks
// down ROWS output rows of one column after another. It keeps the window of x, so that a step brings what is new of it,
// while the step before is multiplied; neighbouring columns are other threads' and meet in the L1 cache. In the end
// threads with the same channels add up in shared memory, in a fixed order. Columns are cut into parts, one for each
// blockIdx.y.
//
// Serves `depthwise`.
#include "common/conv_shape.cuh"
#include "common/elements.cuh"
#include "common/ptx.cuh"

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int POSITIONS = THREADS / LANES;  // columns that a block walks down at once
constexpr int BLOCK_CHANNELS = LANES * VECTOR;
constexpr int LEAVING = STRIDE_H % DILATION_H == 0 ? STRIDE_H / DILATION_H : FILTER_HEIGHT;  // rows of a window, a step
constexpr int KEPT = LEAVING < FILTER_HEIGHT ? FILTER_HEIGHT - LEAVING : 0;
constexpr int NEW = FILTER_HEIGHT - KEPT;
using Numbers = Pack<Element, VECTOR>;

// A column of outputs, and where its windows lie.
struct Walk {
    const Element* image;     // of x, at the thread's channels
    const Element* gradient;  // of its first output
    int first_row, rows, column;
};

__device__ __forceinline__ bool is_between(int value, int end) {
    return static_cast<unsigned>(value) < static_cast<unsigned>(end);  // a negative value is a large one
}

__device__ __forceinline__ Walk walk_of(const Element* x, const Element* gradient, const ConvShape& shape, int number,
                                        int channel) {
    const int segments = (shape.output_height + ROWS - 1) / ROWS;
    const int column = number % shape.output_width, row = number / shape.output_width % segments * ROWS;
    const long long image = number / shape.output_width / segments;
    const long long output = (image * shape.output_height + row) * shape.output_width + column;
    return {x + image * shape.height * shape.width * shape.channels + channel, gradient + output * shape.channels + channel,
            row * STRIDE_H - shape.pad_h, min(ROWS, shape.output_height - row), column * STRIDE_W - shape.pad_w};
}

// One row of a window, zeros outside of the image.
__device__ __forceinline__ void load_row(Numbers (&row)[FILTER_WIDTH], const Walk& walk, const ConvShape& shape, int at) {
    const bool inside = is_between(at, shape.height);
#pragma unroll
    for (int s = 0; s < FILTER_WIDTH; ++s) {
        const int column = walk.column + s * DILATION_W;
        const long long pixel = 1LL * at * shape.width + column;
        row[s] = load_pack_if<Element, VECTOR>(inside && is_between(column, shape.width),
                                               walk.image + pixel * shape.channels);
    }
}

struct Sums {
    float of_taps[TAPS][VECTOR], of_bias[VECTOR];
};

__device__ __forceinline__ void multiply_add(Sums& sums, const Numbers (&window)[FILTER_HEIGHT][FILTER_WIDTH],
                                             const Numbers& gradient) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        const float g = to_float(gradient.at[v]);
        if (HAS_BIAS) sums.of_bias[v] += g;
#pragma unroll
        for (int r = 0; r < FILTER_HEIGHT; ++r)
#pragma unroll
            for (int s = 0; s < FILTER_WIDTH; ++s)
                sums.of_taps[r * FILTER_WIDTH + s][v] += g * to_float(window[r][s].at[v]);
    }
}

__device__ __forceinline__ void walk_down(Sums& sums, const Walk& walk, const ConvShape& shape) {
    const long long step = 1LL * shape.output_width * shape.channels;
    Numbers window[FILTER_HEIGHT][FILTER_WIDTH], ahead[NEW][FILTER_WIDTH];
#pragma unroll
    for (int r = 0; r < KEPT; ++r) load_row(window[r], walk, shape, walk.first_row + r * DILATION_H);
#pragma unroll
    for (int r = 0; r < NEW; ++r) load_row(ahead[r], walk, shape, walk.first_row + (KEPT + r) * DILATION_H);
    Numbers next = load_pack<Element, VECTOR>(walk.gradient);
#pragma unroll 1
    for (int row = 0; row < walk.rows; ++row) {
        const Numbers gradient = next;
#pragma unroll
        for (int r = 0; r < NEW; ++r)
#pragma unroll
            for (int s = 0; s < FILTER_WIDTH; ++s) window[KEPT + r][s] = ahead[r][s];
        if (row + 1 < walk.rows) {
            const int first = walk.first_row + (row + 1) * STRIDE_H;
            next = load_pack<Element, VECTOR>(walk.gradient + (row + 1) * step);
#pragma unroll
            for (int r = 0; r < NEW; ++r) load_row(ahead[r], walk, shape, first + (KEPT + r) * DILATION_H);
        }
        multiply_add(sums, window, gradient);
#pragma unroll
        for (int r = 0; r < KEPT; ++r)
#pragma unroll
            for (int s = 0; s < FILTER_WIDTH; ++s) window[r][s] = window[r + LEAVING][s];
    }
}

// The sums of a block's threads with the same channels, of one tap or of the bias, to their places in a part.
__device__ __forceinline__ void add_up(const float (&sums)[VECTOR], float (&room)[POSITIONS][BLOCK_CHANNELS], float* part,
                                       int pitch, int channels) {
    __syncthreads();
    if (threadIdx.x < LANES * POSITIONS) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) room[threadIdx.x / LANES][threadIdx.x % LANES * VECTOR + v] = sums[v];
    }
    __syncthreads();
    for (int channel = threadIdx.x; channel < channels; channel += THREADS) {
        float sum = room[0][channel];
        for (int position = 1; position < POSITIONS; ++position) sum += room[position][channel];
        part[1LL * channel * pitch] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_weight_gradient_depthwise(const Element* __restrict__ x, const Element* __restrict__ gradient,
                                     float* __restrict__ parts, ConvShape shape, int walks, int part_walks) {
    __shared__ float room[POSITIONS][BLOCK_CHANNELS];
    wait_for_previous_launch();
    const int first_channel = blockIdx.x * BLOCK_CHANNELS;
    const int channel = first_channel + threadIdx.x % LANES * VECTOR, position = threadIdx.x / LANES;
    const int first = blockIdx.y * part_walks, end = min(walks, first + part_walks);
    Sums sums = {};
    if (channel < shape.channels && position < POSITIONS)
        for (int number = first + position; number < end; number += POSITIONS)
            walk_down(sums, walk_of(x, gradient, shape, number, channel), shape);
    const int channels = min(BLOCK_CHANNELS, shape.channels - first_channel);
    float* part = parts + 1LL * blockIdx.y * shape.channels * (TAPS + HAS_BIAS);
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
        add_up(sums.of_taps[tap], room, part + 1LL * first_channel * TAPS + tap, TAPS, channels);
    if (HAS_BIAS) add_up(sums.of_bias, room, part + 1LL * shape.channels * TAPS + first_channel, 1, channels);
}
