// y[n][k][oh][ow] = sum over c, r, s of x[n][c][oh*stride + r*dilation - pad][...] * w[k][c][r][s]
//
// Direct convolution, one CTA per output tile: the middle of the ladder, one switch per idea.
//   INPUT_TILE         stage the CTA's part of x, halo included, in smem, CHUNK channels at a time
//   WEIGHTS            0: read from global memory; 1: staged in smem; 2: in constant memory
//   X_PITCH, X_PLANE   pitch of a row and a channel of the input tile, padded against bank conflicts
//   ..._VECTOR         elements per access: of x, w and y in global memory, of both tiles in smem
//   RUN, RUNS, OUTPUTS_K   a thread accumulates RUNS runs of RUN adjacent pixels times OUTPUTS_K filters in registers
//   NHWC               channels innermost; the smem tiles are the same in both layouts
//   RESTRICT           __restrict__ pointers, so x and w may use the read-only path
//   UNROLL_..., SLIDING    unroll the taps; a row of inputs is read once and slides over its taps in registers
//
// With all of them, a filter row costs RUN * RUNS * OUTPUTS_K * FILTER_WIDTH multiply-adds for a few 16-byte smem
// reads. Limiter: instruction issue. Each of the four schedulers of an SM issues one instruction per clock, so the
// limit is the share of multiply-adds among the instructions.
//
// Rung                 switches; each keeps those of the rung above it, except WEIGHTS
//   input_tile         WEIGHTS 0
//   constant_weights   WEIGHTS 2
//   weight_tile        WEIGHTS 1
//   padded_tile        X_PITCH and X_PLANE beyond what the tile needs
//   vector_loads       X_VECTOR, W_VECTOR
//   register_blocking  RUN 4, RUNS 2, OUTPUTS_K 4 or 8, and with them FILTER_VECTOR and Y_VECTOR
//   nhwc               NHWC
//   restrict           RESTRICT, in either layout
//   unrolled           UNROLL_ROWS, UNROLL_COLUMNS, SLIDING
//   tuned              tile, RUN, RUNS, OUTPUTS_K and CHUNK chosen for the problem
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                    // problem.dtype
constexpr bool NHWC = false;              // problem.layout == "nhwc"
constexpr bool HAS_BIAS = false;          // problem.bias
constexpr bool HAS_RESIDUAL = false;      // problem.residual
constexpr bool HAS_RELU = false;          // problem.relu
constexpr int FILTER_HEIGHT = 3;          // problem.filter_height
constexpr int FILTER_WIDTH = 3;           // problem.filter_width
constexpr int STRIDE_H = 1;               // problem.stride[0]
constexpr int STRIDE_W = 1;               // problem.stride[1]
constexpr int DILATION_H = 1;             // problem.dilation[0]
constexpr int DILATION_W = 1;             // problem.dilation[1]
constexpr int TILE_IMAGES = 1;            // config.images
constexpr int TILE_ROWS = 8;              // config.rows
constexpr int TILE_COLUMNS = 8;           // config.columns
constexpr int CHUNK = 8;                  // config.chunk: channels per stage
constexpr int RUN = 1;                    // config.run: adjacent pixels of one row per thread
constexpr int RUNS = 1;                   // config.runs: runs of pixels per thread
constexpr int OUTPUTS_K = 1;              // config.outputs_k: filters per thread
constexpr int PIXEL_THREADS = 64;         // config.pixel_threads
constexpr int FILTER_THREADS = 4;         // config.filter_threads
constexpr bool INPUT_TILE = true;         // config.input_tile: stage inputs in shared memory
constexpr int WEIGHTS = 0;                // weights: 0 in global, 1 in shared, 2 in constant memory
constexpr int X_PITCH = 10;               // shape.pitch: floats per row of the input tile
constexpr int X_PLANE = 100;              // shape.plane: floats per channel of the input tile
constexpr int X_MARGIN = 0;               // shape.margin: floats before the input tile
constexpr int X_VECTOR = 1;               // shape.x_vector
constexpr int W_VECTOR = 1;               // shape.w_vector
constexpr int Y_VECTOR = 1;               // shape.y_vector
constexpr int FILTER_VECTOR = 1;          // shape.filter_vector
constexpr int WINDOW_VECTOR = 1;          // shape.window_vector
constexpr bool SLIDING = false;           // shape.sliding: keep a row of inputs in registers
constexpr int UNROLL_ROWS = 1;            // shape.unroll_rows
constexpr int UNROLL_COLUMNS = 1;         // shape.unroll_columns
#define RESTRICT                          // "__restrict__" if config.restrict else ""
constexpr int CHANNELS = 1;               // problem.channels if weights == 2 else 1: known at compile time for constant memory only
constexpr int FILTERS = 1;                // problem.filters if weights == 2 else 1
constexpr int CONSTANT_WEIGHT_COUNT = 1;  // problem.weight_elements if weights == 2 else 1
constexpr int CONSTANT_BIAS_COUNT = 1;    // problem.filters if weights == 2 and problem.bias else 1
#endif

#include "common/epilogue.cuh"
#include "common/ptx.cuh"

constexpr int SHARED_WEIGHTS = 1, CONSTANT_WEIGHTS = 2;

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int INPUT_ROWS = (TILE_ROWS - 1) * STRIDE_H + (FILTER_HEIGHT - 1) * DILATION_H + 1;
constexpr int INPUT_COLUMNS = (TILE_COLUMNS - 1) * STRIDE_W + (FILTER_WIDTH - 1) * DILATION_W + 1;
constexpr int RUNS_PER_ROW = TILE_COLUMNS / RUN;
constexpr int TILE_RUNS = TILE_IMAGES * TILE_ROWS * RUNS_PER_ROW;
constexpr int TILE_FILTERS = FILTER_THREADS * OUTPUTS_K;
constexpr int THREADS = PIXEL_THREADS * FILTER_THREADS;
constexpr int INPUT_FLOATS = INPUT_TILE ? (X_MARGIN + CHUNK * X_PLANE + 3) / 4 * 4 : 0;  // keeps the weights aligned
constexpr int WINDOW = (RUN - 1) * STRIDE_W + (FILTER_WIDTH - 1) * DILATION_W + 1;

static_assert(TILE_COLUMNS % RUN == 0, "a run does not leave its row");
static_assert(RUNS * PIXEL_THREADS >= TILE_RUNS, "every run has a thread");
static_assert(RUN % Y_VECTOR == 0 || NHWC, "in NCHW a vector of outputs is part of a run");

// In tensor order and type, as the host copies them.
__constant__ Element constant_weights[CONSTANT_WEIGHT_COUNT];
__constant__ Element constant_bias[CONSTANT_BIAS_COUNT];

struct Tile {  // origin of the CTA's outputs
    int image, row, column, filter;
};

struct Run {  // RUN adjacent pixels of one row
    int image, row, column;
};

// Adjacent threads store to adjacent addresses: pixels in NCHW, filters in NHWC.
__device__ __forceinline__ int pixel_thread() {
    return NHWC ? threadIdx.x / FILTER_THREADS : threadIdx.x % PIXEL_THREADS;
}
__device__ __forceinline__ int filter_thread() {
    if (FILTER_THREADS == 1) return 0;  // explicit, so that the compiler knows the addresses of constant weights
    return NHWC ? threadIdx.x % FILTER_THREADS : threadIdx.x / PIXEL_THREADS;
}

// Filter `j` of a thread, within the tile: vectors of adjacent threads are contiguous.
__device__ __forceinline__ int filter_in_tile(int j) {
    return (j / FILTER_VECTOR * FILTER_THREADS + filter_thread()) * FILTER_VECTOR + j % FILTER_VECTOR;
}

__device__ __forceinline__ Run run_in_tile(int index) {
    return {index / (TILE_ROWS * RUNS_PER_ROW), index / RUNS_PER_ROW % TILE_ROWS, index % RUNS_PER_ROW * RUN};
}

__device__ __forceinline__ bool is_between(int value, int end) {
    return static_cast<unsigned>(value) < static_cast<unsigned>(end);  // a negative value wraps to a large one
}

// Copies LINES lines of WIDTH vectors from global to shared memory. A thread keeps its position in the line, so what
// depends on it is computed once. All loads of a batch are issued before its first store, so latencies overlap.
template <int WIDTH, int LINES, class Load, class Store>
__device__ __forceinline__ void stage(Load load, Store store) {
    constexpr int ACROSS = WIDTH < THREADS ? WIDTH : THREADS;
    constexpr int TOGETHER = THREADS / ACROSS;  // lines in flight
    constexpr int STEPS = (LINES + TOGETHER - 1) / TOGETHER;
    constexpr int BATCH = STEPS < 4 ? STEPS : 4;
    const int first_line = threadIdx.x / ACROSS;
    if (first_line >= TOGETHER) return;
#pragma unroll 1
    for (int place = threadIdx.x % ACROSS; place < WIDTH; place += ACROSS)
#pragma unroll 1
        for (int line = first_line; line < LINES; line += BATCH * TOGETHER) {
            decltype(load(0, 0)) packs[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) packs[i] = load(place, line + i * TOGETHER);
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (line + i * TOGETHER < LINES) store(place, line + i * TOGETHER, packs[i]);
        }
}

// Elements at `address`, or zeros. Branch-free, so that loads issue back to back: if outside, reads `anywhere` and
// discards it.
template <int COUNT>
__device__ __forceinline__ Pack<Element, COUNT> load_if(bool inside, const Element* address, const Element* anywhere) {
    Pack<Element, COUNT> pack = load_pack<Element, COUNT>(inside ? address : anywhere);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) pack.at[j] = inside ? pack.at[j] : from_float<Element>(0.f);
    return pack;
}

__device__ __forceinline__ int image_of_row(int tile_row) { return TILE_IMAGES == 1 ? 0 : tile_row / INPUT_ROWS; }

// input_tile[channel][image and row][column] = x, zero outside the image.
__device__ __forceinline__ void stage_input(float* input_tile, const Element* x, const ConvShape& shape, Tile tile,
                                            int first_channel) {
    const int first_row = tile.row * STRIDE_H - shape.pad_h;
    const int first_column = tile.column * STRIDE_W - shape.pad_w;
    const long long image_size = 1LL * shape.channels * shape.height * shape.width;
    const Element* first_image = x + tile.image * image_size;
    constexpr int ALL_ROWS = TILE_IMAGES * INPUT_ROWS;
    using Vector = Pack<Element, X_VECTOR>;

    if (NHWC) {  // a vector is X_VECTOR channels of one pixel, a line is a row of pixels
        constexpr int CHANNEL_VECTORS = (CHUNK + X_VECTOR - 1) / X_VECTOR;
        stage<CHANNEL_VECTORS * INPUT_COLUMNS, ALL_ROWS>(
            [&](int place, int line) {
                const int channel = first_channel + place % CHANNEL_VECTORS * X_VECTOR;
                const int column = first_column + place / CHANNEL_VECTORS;
                const int image = image_of_row(line), row = first_row + line - image * INPUT_ROWS;
                const bool inside = channel < shape.channels && is_between(column, shape.width) &&
                                    is_between(row, shape.height) && tile.image + image < shape.batch;
                const int at = (row * shape.width + column) * shape.channels + channel;
                return load_if<X_VECTOR>(inside, first_image + image * image_size + at, x);
            },
            [&](int place, int line, const Vector& pack) {
                const int channel = place % CHANNEL_VECTORS * X_VECTOR, column = place / CHANNEL_VECTORS;
#pragma unroll
                for (int j = 0; j < X_VECTOR; ++j)
                    input_tile[(channel + j) * X_PLANE + line * X_PITCH + column] = to_float(pack.at[j]);
            });
    } else {  // a vector is X_VECTOR columns, aligned to X_VECTOR, so it is all inside or all outside
        constexpr int ROW_VECTORS = (INPUT_COLUMNS + 2 * X_VECTOR - 2) / X_VECTOR;
        const int shift = first_column & (X_VECTOR - 1);  // columns in front that alignment adds
        stage<ROW_VECTORS, CHUNK * ALL_ROWS>(
            [&](int place, int line) {
                const int column = first_column - shift + place * X_VECTOR;
                const int tile_row = line / CHUNK, channel = first_channel + line % CHUNK;
                const int image = image_of_row(tile_row), row = first_row + tile_row - image * INPUT_ROWS;
                const bool inside = channel < shape.channels && is_between(column, shape.width) &&
                                    is_between(row, shape.height) && tile.image + image < shape.batch;
                const int at = (channel * shape.height + row) * shape.width + column;
                return load_if<X_VECTOR>(inside, first_image + image * image_size + at, x);
            },
            [&](int place, int line, const Vector& pack) {
                float* row = input_tile + line % CHUNK * X_PLANE + line / CHUNK * X_PITCH;
#pragma unroll
                for (int j = 0; j < X_VECTOR; ++j) row[place * X_VECTOR - shift + j] = to_float(pack.at[j]);
            });
    }
}

// weight_tile[channel][tap][filter] = w; past the last filter or channel the values are arbitrary, since no stored sum
// uses them. Filters run along threads: a warp's loads are scattered, but its stores have no bank conflicts.
__device__ __forceinline__ void stage_weights(float* weight_tile, const Element* weight, const ConvShape& shape,
                                              int first_filter, int first_channel) {
    using Vector = Pack<Element, W_VECTOR>;
    if (NHWC) {  // a vector is W_VECTOR channels of one filter and tap, a line is a tap
        constexpr int CHANNEL_VECTORS = (CHUNK + W_VECTOR - 1) / W_VECTOR;
        stage<TILE_FILTERS * CHANNEL_VECTORS, TAPS>(
            [&](int place, int tap) {
                const int filter = first_filter + place % TILE_FILTERS;
                const int channel = first_channel + place / TILE_FILTERS * W_VECTOR;
                const bool inside = filter < shape.filters && channel < shape.channels && tap < TAPS;
                const int at = (filter * TAPS + tap) * shape.channels + channel;
                return load_pack<Element, W_VECTOR>(inside ? weight + at : weight);
            },
            [&](int place, int tap, const Vector& pack) {
                const int filter = place % TILE_FILTERS, channel = place / TILE_FILTERS * W_VECTOR;
#pragma unroll
                for (int j = 0; j < W_VECTOR; ++j)
                    weight_tile[((channel + j) * TAPS + tap) * TILE_FILTERS + filter] = to_float(pack.at[j]);
            });
    } else {  // a vector is W_VECTOR consecutive weights of one filter, over channels and taps
        stage<TILE_FILTERS, CHUNK * TAPS / W_VECTOR>(
            [&](int place, int line) {
                const int filter = first_filter + place, at = first_channel * TAPS + line * W_VECTOR;
                const bool inside = filter < shape.filters && at < shape.channels * TAPS;
                return load_pack<Element, W_VECTOR>(inside ? weight + filter * shape.channels * TAPS + at : weight);
            },
            [&](int place, int line, const Vector& pack) {
#pragma unroll
                for (int j = 0; j < W_VECTOR; ++j)
                    weight_tile[(line * W_VECTOR + j) * TILE_FILTERS + place] = to_float(pack.at[j]);
            });
    }
}

// The thread's weights of one channel and tap. `channel` counts from the chunk's first.
__device__ __forceinline__ void read_weights(float (&w)[OUTPUTS_K], const float* weight_tile, const Element* weight,
                                             const ConvShape& shape, int first_filter, int first_channel, int channel,
                                             int tap) {
    if (WEIGHTS == SHARED_WEIGHTS) {
        const float* tap_weights = weight_tile + (channel * TAPS + tap) * TILE_FILTERS;
#pragma unroll
        for (int j = 0; j < OUTPUTS_K; j += FILTER_VECTOR) {
            const Pack<float, FILTER_VECTOR> pack = load_pack<float, FILTER_VECTOR>(tap_weights + filter_in_tile(j));
#pragma unroll
            for (int v = 0; v < FILTER_VECTOR; ++v) w[j + v] = pack.at[v];
        }
    } else {
        const int channels = WEIGHTS == CONSTANT_WEIGHTS ? CHANNELS : shape.channels;
        const int filters = WEIGHTS == CONSTANT_WEIGHTS ? FILTERS : shape.filters;
#pragma unroll
        for (int j = 0; j < OUTPUTS_K; ++j) {
            // Sums past the last filter are never stored: any weight will do.
            const int filter = min(first_filter + filter_in_tile(j), filters - 1);
            const int c = first_channel + channel;
            const int at = NHWC ? (filter * TAPS + tap) * channels + c : (filter * channels + c) * TAPS + tap;
            w[j] = to_float(WEIGHTS == CONSTANT_WEIGHTS ? constant_weights[at] : weight[at]);
        }
    }
}

// Inputs of a run for one filter row, from FIRST on: WIDTH at a time, narrower at the end.
template <int FIRST, int WIDTH>
__device__ __forceinline__ void read_window(float (&window)[WINDOW], const float* address) {
    if constexpr (FIRST + WIDTH <= WINDOW) {
        const Pack<float, WIDTH> pack = load_pack<float, WIDTH>(address + FIRST);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) window[FIRST + i] = pack.at[i];
        read_window<FIRST + WIDTH, WIDTH>(window, address);
    } else if constexpr (WIDTH > 1) {
        read_window<FIRST, WIDTH / 2>(window, address);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_direct_tiled(const Element* RESTRICT x, const Element* RESTRICT weight, const Element* RESTRICT bias,
                        const Element* RESTRICT residual, Element* RESTRICT y, ConvShape shape) {
    wait_for_previous_launch();
    extern __shared__ float4 shared_memory[];
    float* const input_tile = shared_part(reinterpret_cast<float*>(shared_memory), INPUT_FLOATS) + X_MARGIN;
    float* const weight_tile = shared_part(reinterpret_cast<float*>(shared_memory) + INPUT_FLOATS, REST);

    // CTAs that differ only in their filters are adjacent, so that they share x in L2.
    const int filters = WEIGHTS == CONSTANT_WEIGHTS ? FILTERS : shape.filters;
    const int channels = WEIGHTS == CONSTANT_WEIGHTS ? CHANNELS : shape.channels;
    const int filter_tiles = (filters + TILE_FILTERS - 1) / TILE_FILTERS;
    const int column_tiles = (shape.output_width + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int row_tiles = (shape.output_height + TILE_ROWS - 1) / TILE_ROWS;
    const int pixel_tile = blockIdx.x / filter_tiles;
    const Tile tile = {
        pixel_tile / column_tiles / row_tiles * TILE_IMAGES,
        pixel_tile / column_tiles % row_tiles * TILE_ROWS,
        pixel_tile % column_tiles * TILE_COLUMNS,
        static_cast<int>(blockIdx.x % filter_tiles) * TILE_FILTERS,
    };

    Run runs[RUNS];
    const float* run_inputs[RUNS];
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
        // A thread without a run of its own recomputes the last one and does not store it.
        runs[run] = run_in_tile(min(pixel_thread() + run * PIXEL_THREADS, TILE_RUNS - 1));
        run_inputs[run] = input_tile + (runs[run].image * INPUT_ROWS + runs[run].row * STRIDE_H) * X_PITCH +
                          runs[run].column * STRIDE_W;
    }

    float acc[RUNS][RUN][OUTPUTS_K] = {};
#pragma unroll 1
    for (int first_channel = 0; first_channel < channels; first_channel += CHUNK) {
        if (INPUT_TILE || WEIGHTS == SHARED_WEIGHTS) {
            if (first_channel > 0) __syncthreads();  // the previous chunk has been used
            if (INPUT_TILE) stage_input(input_tile, x, shape, tile, first_channel);
            if (WEIGHTS == SHARED_WEIGHTS) stage_weights(weight_tile, weight, shape, tile.filter, first_channel);
            __syncthreads();
        }
        const int chunk = min(CHUNK, channels - first_channel);
#pragma unroll 1
        for (int channel = 0; channel < chunk; ++channel) {
#pragma unroll UNROLL_ROWS
            for (int r = 0; r < FILTER_HEIGHT; ++r) {
                float windows[RUNS][WINDOW];
                if (SLIDING) {
#pragma unroll
                    for (int run = 0; run < RUNS; ++run)
                        read_window<0, WINDOW_VECTOR>(
                            windows[run], run_inputs[run] + channel * X_PLANE + r * DILATION_H * X_PITCH);
                }
#pragma unroll UNROLL_COLUMNS
                for (int s = 0; s < FILTER_WIDTH; ++s) {
                    float w[OUTPUTS_K];
                    read_weights(w, weight_tile, weight, shape, tile.filter, first_channel, channel,
                                 r * FILTER_WIDTH + s);
#pragma unroll
                    for (int run = 0; run < RUNS; ++run)
#pragma unroll
                        for (int i = 0; i < RUN; ++i) {
                            const int ahead = i * STRIDE_W + s * DILATION_W;  // relative to the run's first input
                            float value;
                            if (SLIDING) {
                                value = windows[run][ahead];
                            } else if (INPUT_TILE) {
                                value = run_inputs[run][channel * X_PLANE + r * DILATION_H * X_PITCH + ahead];
                            } else {
                                const int image = tile.image + runs[run].image;
                                const int row = (tile.row + runs[run].row) * STRIDE_H - shape.pad_h + r * DILATION_H;
                                const int column = (tile.column + runs[run].column) * STRIDE_W - shape.pad_w + ahead;
                                const int c = first_channel + channel;
                                const int pixel = row * shape.width + column;
                                value = 0.f;
                                if (image < shape.batch && is_between(row, shape.height) &&
                                    is_between(column, shape.width))
                                    value = to_float(x[1LL * image * channels * shape.height * shape.width +
                                                       (NHWC ? pixel * channels + c
                                                             : c * shape.height * shape.width + pixel)]);
                            }
#pragma unroll
                            for (int j = 0; j < OUTPUTS_K; ++j) acc[run][i][j] += value * w[j];
                        }
                }
            }
        }
    }

    // Y_VECTOR consecutive elements: pixels of a run in NCHW, filters in NHWC.
    constexpr int PIXEL_STEP = NHWC ? 1 : Y_VECTOR, FILTER_STEP = NHWC ? Y_VECTOR : 1;
    const Element* const bias_here = WEIGHTS == CONSTANT_WEIGHTS ? constant_bias : bias;
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
        const int image = tile.image + runs[run].image, output_row = tile.row + runs[run].row;
        if (pixel_thread() + run * PIXEL_THREADS >= TILE_RUNS) continue;
        if (image >= shape.batch || output_row >= shape.output_height) continue;
#pragma unroll
        for (int i = 0; i < RUN; i += PIXEL_STEP)
#pragma unroll
            for (int j = 0; j < OUTPUTS_K; j += FILTER_STEP) {
                const int output_column = tile.column + runs[run].column + i;
                const int filter = tile.filter + filter_in_tile(j);
                if (output_column >= shape.output_width || filter >= filters) continue;
                const int pixels = shape.output_height * shape.output_width;
                const int pixel = output_row * shape.output_width + output_column;
                const long long at =
                    1LL * image * filters * pixels + (NHWC ? pixel * filters + filter : filter * pixels + pixel);
                Pack<Element, Y_VECTOR> residuals, outputs;
                if (HAS_RESIDUAL) residuals = load_pack<Element, Y_VECTOR>(residual + at);
#pragma unroll
                for (int v = 0; v < Y_VECTOR; ++v) {
                    const float sum = NHWC ? acc[run][i][j + v] : acc[run][i + v][j];
                    outputs.at[v] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(sum, bias_here, NHWC ? filter + v : filter,
                                                                             residuals.at, v);
                }
                store_pack(y + at, outputs);
            }
    }
}
