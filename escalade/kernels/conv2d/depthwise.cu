// y[n][k][oh][ow] = sum over r, s of x[n][k / MULTIPLIER][oh*stride + r*dilation - pad][...] * w[k][r][s]
//
// MULTIPLIER filters per channel. A thread owns VECTOR filters (one in NCHW) and STRIP adjacent output columns, and
// walks down ROWS output rows. Its weights and the accumulators of all output rows that an input row reaches stay in
// registers, so it reads every input once, one row ahead of the multiply-adds. Strips that share columns are adjacent
// and share them in L1.
// Limiter: memory; from 5x5 on in 16 bits, FFMA throughput.
//
// Rung: `depthwise`. conv2d_input_gradient launches it over a gradient, with flipped filters.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool NHWC = false;          // problem.layout == "nhwc"
constexpr int IMAGE_CHANNELS = 1;     // problem.channels
constexpr int MULTIPLIER = 4;         // problem.group_filters
constexpr int X_STEP = 1;             // problem.x_pitch or problem.channels
constexpr int Y_STEP = 4;             // problem.y_pitch or problem.filters
constexpr int FILTER_HEIGHT = 7;      // problem.filter_height
constexpr int FILTER_WIDTH = 7;       // problem.filter_width
constexpr int STRIDE_H = 1;           // problem.stride[0]
constexpr int STRIDE_W = 1;           // problem.stride[1]
constexpr int DILATION_H = 1;         // problem.dilation[0]
constexpr int DILATION_W = 1;         // problem.dilation[1]
constexpr int VECTOR = 1;             // config.vector: filters per thread
constexpr int STRIP = 1;              // config.strip: output columns per thread
constexpr int ROWS = 1;               // config.rows: output rows per thread
constexpr int LANES = 1;              // config.lanes: threads per CTA along the filters
constexpr int THREADS = 128;          // config.threads
constexpr int PHASES = 7;             // config.phases: unrolled steps of the kernel's loop
constexpr bool HAS_BIAS = false;      // problem.bias
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr bool HAS_RELU = false;      // problem.relu
#endif

#include "common/epilogue.cuh"
#include "common/ptx.cuh"

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int OPEN = ((FILTER_HEIGHT - 1) * DILATION_H + STRIDE_H) / STRIDE_H;  // output rows that an input row reaches
constexpr int WINDOW = (STRIP - 1) * STRIDE_W + (FILTER_WIDTH - 1) * DILATION_W + 1;
constexpr int FILTERS = IMAGE_CHANNELS * MULTIPLIER;
constexpr int BLOCK_FILTERS = LANES * VECTOR;  // in NHWC
constexpr int WEIGHT_PITCH = BLOCK_FILTERS + VECTOR;
constexpr int INPUTS = VECTOR > MULTIPLIER ? VECTOR / MULTIPLIER : 1;  // channels per thread
constexpr int POSITIONS = THREADS / LANES;
static_assert(NHWC || VECTOR == 1, "in NCHW columns are contiguous");
static_assert(VECTOR % MULTIPLIER == 0 || MULTIPLIER % VECTOR == 0, "a thread's filters are those of whole channels");
static_assert(PHASES == 1 || PHASES == OPEN, "accumulators shift every step or rotate");
constexpr int COLUMN_STEP = NHWC ? X_STEP : 1;  // compile-time constant, so that columns are immediate offsets
constexpr int OUTPUT_STEP = NHWC ? Y_STEP : 1;

// COUNT elements as loaded and stored. Held as words, because the compiler unpacks and repacks 16-bit values carried
// around a loop.
template <int REST>
struct WordOf {
    using Type = u16;
};
template <>
struct WordOf<0> {
    using Type = u32;
};

template <int COUNT>
struct alignas(sizeof(Element) * COUNT) Words {
    static constexpr int BYTES = sizeof(Element) * COUNT;
    using Word = typename WordOf<BYTES % 4>::Type;
    Word at[BYTES / sizeof(Word)];

    __device__ __forceinline__ Pack<Element, COUNT> elements() const {
        Pack<Element, COUNT> pack;
        memcpy(&pack, at, BYTES);
        return pack;
    }
};

struct ThreadTile {  // a thread's filters and the corner of its outputs
    int image, filter, row, column;
    bool exists;
};

// Adjacent threads are adjacent in memory: channels in NHWC, strips in NCHW.
__device__ __forceinline__ ThreadTile thread_tile(const ConvShape& shape) {
    const int strips = (shape.output_width + STRIP - 1) / STRIP;
    const int segments = (shape.output_height + ROWS - 1) / ROWS;
    ThreadTile tile;
    if (NHWC) {
        const int filter_blocks = (FILTERS + BLOCK_FILTERS - 1) / BLOCK_FILTERS;
        const int position = blockIdx.x / filter_blocks * POSITIONS + threadIdx.x / LANES;
        tile.filter = blockIdx.x % filter_blocks * BLOCK_FILTERS + threadIdx.x % LANES * VECTOR;
        tile.column = position % strips * STRIP;
        tile.row = position / strips % segments * ROWS;
        tile.image = position / strips / segments;
    } else {
        long long position = 1LL * blockIdx.x * THREADS + threadIdx.x;
        tile.column = position % strips * STRIP, position /= strips;
        tile.row = position % segments * ROWS, position /= segments;
        tile.filter = position % FILTERS, tile.image = position / FILTERS;
    }
    tile.exists = tile.image < shape.batch && tile.filter < FILTERS;
    return tile;
}

// A thread's weights. In NHWC they are TAPS apart, so the CTA transposes them through smem.
__device__ __forceinline__ void load_weights(float (&w)[TAPS][VECTOR], const Element* weight, const ThreadTile& tile) {
    if (NHWC) {
        __shared__ __align__(16) float transposed[TAPS * WEIGHT_PITCH];
        const int first_filter = tile.filter - threadIdx.x % LANES * VECTOR;
        const int here = min(BLOCK_FILTERS, FILTERS - first_filter) * TAPS;
        const Element* const block_weights = weight + 1LL * first_filter * TAPS;
#pragma unroll 4
        for (int i = threadIdx.x; i < here; i += THREADS)
            transposed[i % TAPS * WEIGHT_PITCH + i / TAPS] = to_float(block_weights[i]);
        __syncthreads();
        if (!tile.exists) return;
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
            constexpr int WIDTH = VECTOR < 4 ? VECTOR : 4;
#pragma unroll
            for (int v = 0; v < VECTOR; v += WIDTH) {
                const int at = tap * WEIGHT_PITCH + threadIdx.x % LANES * VECTOR + v;
                const Pack<float, WIDTH> pack = load_pack<float, WIDTH>(transposed + at);
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) w[tap][v + e] = pack.at[e];
            }
        }
    } else if (tile.exists) {
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) w[tap][0] = to_float(weight[1LL * tile.filter * TAPS + tap]);
    }
}

__device__ __forceinline__ bool is_between(int value, int end) {
    return static_cast<unsigned>(value) < static_cast<unsigned>(end);  // a negative value wraps to a large one
}

// Loads one row of a strip's inputs, starting at `first` in `column`. Pixels outside the image are not written: columns
// are zero from the start, and such rows are not used.
__device__ __forceinline__ void load_row(Words<INPUTS> (&inputs)[WINDOW], const Element* first, int column,
                                         bool row_inside, const ConvShape& shape) {
    if (!row_inside) return;
#pragma unroll
    for (int i = 0; i < WINDOW; ++i)
        if (is_between(column + i, shape.width))
            inputs[i] = *reinterpret_cast<const Words<INPUTS>*>(first + i * COLUMN_STEP);
}

// Multiply-adds of one input row with one filter row.
__device__ __forceinline__ void multiply_add(float (&acc)[STRIP][VECTOR], const float (&inputs)[WINDOW][INPUTS],
                                             const float (&w)[TAPS][VECTOR], int tap_row) {
#pragma unroll
    for (int s = 0; s < FILTER_WIDTH; ++s)
#pragma unroll
        for (int p = 0; p < STRIP; ++p)
#pragma unroll
            for (int v = 0; v < VECTOR; ++v)
                acc[p][v] +=
                    inputs[p * STRIDE_W + s * DILATION_W][v * INPUTS / VECTOR] * w[tap_row * FILTER_WIDTH + s][v];
}

// COUNT outputs, consecutive in memory.
template <int COUNT>
__device__ __forceinline__ void store(Element* y, const Element* residual, const float (&bias)[VECTOR], long long at,
                                      const float (&acc)[COUNT]) {
    Pack<Element, COUNT> residuals, outputs;
    if (HAS_RESIDUAL) residuals = load_pack<Element, COUNT>(residual + at);
#pragma unroll
    for (int e = 0; e < COUNT; ++e) {
        const float sum = HAS_BIAS ? acc[e] + bias[NHWC ? e : 0] : acc[e];
        outputs.at[e] = finish<false, HAS_RESIDUAL, HAS_RELU, Element>(sum, nullptr, 0, residuals.at, e);
    }
    Words<COUNT> words;
    memcpy(words.at, &outputs, words.BYTES);
    *reinterpret_cast<Words<COUNT>*>(y + at) = words;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_depthwise(const Element* x, const Element* weight, const Element* bias, const Element* residual, Element* y,
                     ConvShape shape, int weights_ready) {
    const ThreadTile tile = thread_tile(shape);
    float w[TAPS][VECTOR];
    if (!weights_ready) wait_for_previous_launch();
    load_weights(w, weight, tile);
    if (!tile.exists) return;
    float filter_bias[VECTOR] = {};
    if (HAS_BIAS) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) filter_bias[v] = to_float(bias[tile.filter + v]);
    }
    wait_for_previous_launch();  // returns at once if already waited for

    const int row_step = shape.width * COLUMN_STEP;
    const int rows = min(ROWS, shape.output_height - tile.row);
    const int first_row = tile.row * STRIDE_H - shape.pad_h, first_column = tile.column * STRIDE_W - shape.pad_w;
    const Element* inputs = x + 1LL * tile.image * (NHWC ? X_STEP : IMAGE_CHANNELS) * shape.height * shape.width +
                            1LL * (tile.filter / MULTIPLIER) * (NHWC ? 1 : shape.height * shape.width) +
                            1LL * first_row * row_step + first_column * COLUMN_STEP;
    long long outputs = 1LL * tile.image * (NHWC ? Y_STEP : FILTERS) * shape.output_height * shape.output_width +
                        1LL * tile.filter * (NHWC ? 1 : shape.output_height * shape.output_width) +
                        (tile.row * shape.output_width + tile.column) * OUTPUT_STEP;

    // Each step reads STRIDE_H input rows and completes one output row. The accumulators of output row `step - a` are
    // open[a]. With PHASES 1 they shift every step; with PHASES = OPEN they stay and the index rotates.
    float open[OPEN][STRIP][VECTOR] = {};
    Words<INPUTS> ahead[STRIDE_H][WINDOW] = {};
#pragma unroll
    for (int q = 0; q < STRIDE_H; ++q, inputs += row_step)
        load_row(ahead[q], inputs, first_column, is_between(first_row + q, shape.height), shape);
    const int steps = rows + OPEN - 1;
#pragma unroll 1
    for (int first_step = 0; first_step < steps; first_step += PHASES) {
#pragma unroll
        for (int phase = 0; phase < PHASES; ++phase) {
            const int step = first_step + phase;
            if (step >= steps) break;
#pragma unroll
            for (int q = 0; q < STRIDE_H; ++q, inputs += row_step) {
                const int row = first_row + step * STRIDE_H + q;
                float values[WINDOW][INPUTS];
#pragma unroll
                for (int i = 0; i < WINDOW; ++i) {
                    const Pack<Element, INPUTS> pack = ahead[q][i].elements();
#pragma unroll
                    for (int v = 0; v < INPUTS; ++v) values[i][v] = to_float(pack.at[v]);
                }
                load_row(ahead[q], inputs, first_column, is_between(row + STRIDE_H, shape.height), shape);
                if (!is_between(row, shape.height)) continue;
#pragma unroll
                for (int a = 0; a < OPEN; ++a) {
                    const int reach = q + a * STRIDE_H;
                    if (reach % DILATION_H == 0 && reach / DILATION_H < FILTER_HEIGHT)
                        if (is_between(step - a, rows))
                            multiply_add(open[PHASES == 1 ? a : (phase + OPEN - a) % OPEN], values, w,
                                         reach / DILATION_H);
                }
            }
            float(&complete)[STRIP][VECTOR] = open[PHASES == 1 ? OPEN - 1 : (phase + 1) % OPEN];
            if (step >= OPEN - 1) {
                if constexpr (NHWC) {
#pragma unroll
                    for (int p = 0; p < STRIP; ++p)
                        if (tile.column + p < shape.output_width)
                            store(y, residual, filter_bias, outputs + p * OUTPUT_STEP, complete[p]);
                } else {
                    float acc[STRIP];
#pragma unroll
                    for (int p = 0; p < STRIP; ++p) acc[p] = complete[p][0];
                    store(y, residual, filter_bias, outputs, acc);
                }
                outputs += shape.output_width * OUTPUT_STEP;
            }
#pragma unroll
            for (int p = 0; p < STRIP; ++p)
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    if (PHASES == 1) {
#pragma unroll
                        for (int a = OPEN - 1; a > 0; --a) open[a][p][v] = open[a - 1][p][v];
                        open[0][p][v] = 0.f;
                    } else {
                        complete[p][v] = 0.f;
                    }
                }
        }
    }
}
