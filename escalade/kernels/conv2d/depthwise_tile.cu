// y[n][oh][ow][c] = activated(sum over r, s of x[n][oh*stride + r*dilation - pad][...][c] * w[c][r][s] + bias[c] + ...)
//
// Depthwise convolution, NHWC. Persistent CTAs keep BLOCK_CHANNELS channels and loop over tiles of output pixels. TMA
// loads the window of a tile, zero-filled outside the image, so no thread checks bounds; the next windows are in flight
// meanwhile. A thread owns VECTOR channels of ROWS x STRIP outputs. With ROWS 1 the loop over filter rows is not
// unrolled: code that a launch runs through once costs more to fetch than to execute. With more rows everything is
// unrolled, and an input row is read and converted once for all of them.
// Limiter: memory for 3x3; for larger filters FFMA throughput, one per tap and output plus the conversions of inputs.
//
// With QUANTIZED, elements are bytes with scales (common/epilogue.cuh), and so is y unless `Output` is a wider type.
// Products and sums are in fp32: exact in s8, whose sums of 1024 taps fit into 24 bits.
//
// Rung: `depthwise_tile`. conv2d_input_gradient launches it over a gradient, with flipped filters.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr int CHANNELS = 8;           // problem.channels
constexpr int CHANNEL_BLOCKS = 2;     // tiling.channel_blocks
constexpr int Y_STEP = 8;             // problem.y_pitch or problem.channels
constexpr int FILTER_HEIGHT = 5;      // problem.filter_height
constexpr int FILTER_WIDTH = 5;       // problem.filter_width
constexpr int STRIDE_H = 1;           // problem.stride[0]
constexpr int STRIDE_W = 1;           // problem.stride[1]
constexpr int DILATION_H = 1;         // problem.dilation[0]
constexpr int DILATION_W = 1;         // problem.dilation[1]
constexpr int PAD_H = 2;              // problem.padding[0]
constexpr int PAD_W = 2;              // problem.padding[1]
constexpr int VECTOR = 2;             // config.vector: channels per thread
constexpr int STRIP = 5;              // config.strip: output columns per thread
constexpr int ROWS = 1;               // config.rows: output rows per thread
constexpr int BLOCK_CHANNELS = 4;     // config.channels: channels per CTA
constexpr int TILE_IMAGES = 1;        // config.images: images per tile
constexpr int TILE_ROWS = 10;         // config.tile_rows
constexpr int TILE_COLUMNS = 10;      // config.tile_columns
constexpr int OUTPUT_HEIGHT = 10;     // problem.output_height
constexpr int OUTPUT_WIDTH = 10;      // problem.output_width
constexpr int TILES_DOWN = 1;         // tiling.grid[0]
constexpr int TILES_ACROSS = 1;       // tiling.grid[1]
constexpr int STAGES = 1;             // config.stages: windows in shared memory
constexpr int THREADS = 64;           // tiling.threads
constexpr int BLOCKS_PER_SM = 8;      // config.blocks_per_sm
constexpr bool HAS_BIAS = true;       // problem.bias
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr bool HAS_RELU = false;      // problem.relu
#endif

#include "common/epilogue.cuh"
#include "common/hopper.cuh"
#ifdef QUANTIZED
#include "common/bytes.cuh"
#else
using Output = Element;
#endif

constexpr int LANES = BLOCK_CHANNELS / VECTOR;
constexpr int STRIPS = TILE_COLUMNS / STRIP;
constexpr int BANDS = TILE_ROWS / ROWS;
constexpr int WORKERS = LANES * STRIPS * BANDS * TILE_IMAGES;  // threads with outputs
constexpr int WINDOW_HEIGHT = (TILE_ROWS - 1) * STRIDE_H + (FILTER_HEIGHT - 1) * DILATION_H + 1;
constexpr int WINDOW_WIDTH = (TILE_COLUMNS - 1) * STRIDE_W + (FILTER_WIDTH - 1) * DILATION_W + 1;
constexpr int WINDOW_BYTES = TILE_IMAGES * WINDOW_HEIGHT * WINDOW_WIDTH * BLOCK_CHANNELS * sizeof(Element);
constexpr int STAGE_BYTES = (WINDOW_BYTES + 127) / 128 * 128;
constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int WEIGHT_PITCH = BLOCK_CHANNELS + VECTOR;  // spreads the taps of a channel over many banks
constexpr int WEIGHT_BYTES = TAPS * WEIGHT_PITCH * 4;
constexpr int ROW_STEP = WINDOW_WIDTH * BLOCK_CHANNELS;
constexpr int COLUMNS = (STRIP - 1) * STRIDE_W + (FILTER_WIDTH - 1) * DILATION_W + 1;  // of a thread's inputs
constexpr int INPUT_ROWS = (ROWS - 1) * STRIDE_H + (FILTER_HEIGHT - 1) * DILATION_H + 1;
constexpr int INPUT_STEP = ROWS == 1 ? DILATION_H : 1;  // a single output row skips the rows between its taps
constexpr int OUTPUT_ROW = OUTPUT_WIDTH * Y_STEP;
constexpr int WIDTH = VECTOR < 4 ? VECTOR : 4;  // weights per load
static_assert(BLOCK_CHANNELS % VECTOR == 0 && TILE_COLUMNS % STRIP == 0 && TILE_ROWS % ROWS == 0, "whole threads");
static_assert(WORKERS <= THREADS, "one thread per part of a tile");

// COUNT elements as loaded and stored: as words, so that they move as a unit.
template <int COUNT>
struct alignas(sizeof(Element) * COUNT) Words {
    static constexpr int BYTES = sizeof(Element) * COUNT;
    static_assert(BYTES % 4 == 0, "whole words");
    u32 at[BYTES / 4];

    __device__ __forceinline__ Pack<Element, COUNT> elements() const {
        Pack<Element, COUNT> pack;
        memcpy(&pack, at, BYTES);
        return pack;
    }
};

// Elements as floats. A template, because packs of bytes have no elements to name.
template <class T>
__device__ __forceinline__ void convert(float (&values)[VECTOR], const Pack<T, VECTOR>& pack) {
    if constexpr (sizeof(T) == 1) {
        to_floats(values, pack);
    } else {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] = to_float(pack.at[v]);
    }
}

struct Tile {
    int image, row, column;  // of its first output

    __device__ __forceinline__ explicit Tile(u32 index)
        : image(index / (TILES_ACROSS * TILES_DOWN) * TILE_IMAGES),
          row(index / TILES_ACROSS % TILES_DOWN * TILE_ROWS), column(index % TILES_ACROSS * TILE_COLUMNS) {}
};

__device__ __forceinline__ void load_window(u32 stage, const TensorMap& map, u32 full, const Tile& tile, int channel) {
    barrier_expect(full, WINDOW_BYTES);
    tma_load_4d(stage, map, full, channel, tile.column * STRIDE_W - PAD_W, tile.row * STRIDE_H - PAD_H, tile.image);
}

// Weights of the CTA's channels as [tap][channel]. In global memory they are TAPS apart.
__device__ __forceinline__ void load_weights(float* transposed, const Element* weight, int channel) {
    const int here = min(BLOCK_CHANNELS, CHANNELS - channel) * TAPS;
#pragma unroll 4
    for (int i = threadIdx.x; i < here; i += THREADS)
        transposed[i % TAPS * WEIGHT_PITCH + i / TAPS] = to_float(weight[1LL * channel * TAPS + i]);
}

// Multiply-adds of one input column with one filter row: an input is converted once.
__device__ __forceinline__ void multiply_add(float (&acc)[STRIP][VECTOR], const float (&values)[VECTOR], int column,
                                             const float (&w)[FILTER_WIDTH][VECTOR]) {
#pragma unroll
    for (int p = 0; p < STRIP; ++p) {
        const int reach = column - p * STRIDE_W;
        if (reach < 0 || reach % DILATION_W || reach / DILATION_W >= FILTER_WIDTH) continue;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) acc[p][v] += values[v] * w[reach / DILATION_W][v];
    }
}

__device__ __forceinline__ void load_taps(float (&w)[FILTER_WIDTH][VECTOR], const float* weights, int tap_row) {
#pragma unroll
    for (int s = 0; s < FILTER_WIDTH; ++s)
#pragma unroll
        for (int v = 0; v < VECTOR; v += WIDTH) {
            const Pack<float, WIDTH> pack =
                load_pack<float, WIDTH>(weights + (tap_row * FILTER_WIDTH + s) * WEIGHT_PITCH + v);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) w[s][v + e] = pack.at[e];
        }
}

__device__ constexpr bool is_seen(int column) {  // by an output of the strip
    for (int p = 0; p < STRIP; ++p) {
        const int reach = column - p * STRIDE_W;
        if (reach >= 0 && reach % DILATION_W == 0 && reach / DILATION_W < FILTER_WIDTH) return true;
    }
    return false;
}

// All multiply-adds of a thread. `window` is its first input, `weights` its first tap.
__device__ __forceinline__ void multiply_window(float (&acc)[ROWS][STRIP][VECTOR], const Element* window,
                                                const float* weights) {
#pragma unroll(ROWS == 1 ? 1 : INPUT_ROWS)
    for (int i = 0; i < INPUT_ROWS; i += INPUT_STEP) {
        Words<VECTOR> inputs[COLUMNS];
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
            if (is_seen(column))
                inputs[column] =
                    *reinterpret_cast<const Words<VECTOR>*>(window + i * ROW_STEP + column * BLOCK_CHANNELS);
        float w[ROWS][FILTER_WIDTH][VECTOR];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int reach = i - row * STRIDE_H;
            if (ROWS == 1 || (reach >= 0 && reach % DILATION_H == 0 && reach / DILATION_H < FILTER_HEIGHT))
                load_taps(w[row], weights, reach / DILATION_H);
        }
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            if (!is_seen(column)) continue;
            const Pack<Element, VECTOR> pack = inputs[column].elements();
            float values[VECTOR];
            convert(values, pack);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const int reach = i - row * STRIDE_H;
                if (ROWS == 1 || (reach >= 0 && reach % DILATION_H == 0 && reach / DILATION_H < FILTER_HEIGHT))
                    multiply_add(acc[row], values, column, w[row]);
            }
        }
    }
}

#ifdef QUANTIZED
// Scales and biases of VECTOR channels. Without an expression, the reciprocal of the result's scale is part of them. ReLU
// and saturation are then one instruction in s8: results are computed in 128ths, saturated at 0 and 1.
struct Finish {
    static constexpr bool IN_PARTS = HAS_RELU && is_integer<Output>();
    float scale[VECTOR], bias[VECTOR] = {}, residual_scale, result_scale;

    __device__ __forceinline__ Finish(const float* all_scales, const float* all_biases, const float* scales, int channel)
        : residual_scale(HAS_RESIDUAL ? scales[0] : 1.f), result_scale(scales[1]) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            scale[v] = all_scales[channel + v];
            if (HAS_BIAS) bias[v] = all_biases[channel + v];
        }
#ifndef EXPRESSION
        const float factor = result_scale * (IN_PARTS ? 1.f / 128.f : 1.f);
        residual_scale *= factor;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) scale[v] *= factor, bias[v] *= factor;
#endif
    }

    template <class Stored>
    __device__ __forceinline__ void store(Stored* y, const Element* residual, const float (&acc)[VECTOR]) const {
        float values[VECTOR], added[VECTOR] = {};
        if (HAS_RESIDUAL) convert(added, *reinterpret_cast<const Pack<Element, VECTOR>*>(residual));
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
#ifdef EXPRESSION
            values[v] = finish_scaled<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(acc[v], scale[v], bias[v], added[v],
                                                                        residual_scale, result_scale);
#else
            values[v] = HAS_BIAS ? fmaf(acc[v], scale[v], bias[v]) : acc[v] * scale[v];
            if (HAS_RESIDUAL) values[v] = fmaf(added[v], residual_scale, values[v]);
            if (HAS_RELU) values[v] = IN_PARTS ? __saturatef(values[v]) : relu(values[v]);
#endif
        }
        Pack<Stored, VECTOR> pack;
        if constexpr (IN_PARTS) {
#pragma unroll
            for (int v = 0; v < VECTOR; v += 4) {
                const float four[4] = {values[v], values[v + 1], values[v + 2], values[v + 3]};
                pack.words[v / 4] = s8x4_of_parts(four);
            }
        } else {
            from_floats(pack, values);
        }
        store_pack(y, pack);
    }
};
#else
// VECTOR channels of one output pixel.
__device__ __forceinline__ void store(Element* y, const Element* residual, const float (&acc)[VECTOR]) {
    Words<VECTOR> words;
    Pack<Element, VECTOR> residuals, outputs;
    if (HAS_RESIDUAL) residuals = reinterpret_cast<const Words<VECTOR>*>(residual)->elements();
#pragma unroll
    for (int v = 0; v < VECTOR; ++v)
        outputs.at[v] = finish<false, HAS_RESIDUAL, HAS_RELU, Element>(acc[v], nullptr, 0, residuals.at, v);
    memcpy(words.at, &outputs, words.BYTES);
    *reinterpret_cast<Words<VECTOR>*>(y) = words;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
#ifdef QUANTIZED
    conv2d_depthwise_tile(const __grid_constant__ TensorMap map, const Element* weight, const float* bias,
                          const float* scale, const float* scales, const Element* residual, Output* y, int batch,
                          int tiles, int weights_ready) {
#else
    conv2d_depthwise_tile(const __grid_constant__ TensorMap map, const Element* weight, const Element* bias,
                          const Element* residual, Element* y, int batch, int tiles, int weights_ready) {
#endif
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Element* const stages =
        shared_part(reinterpret_cast<Element*>(shared_memory), STAGES * STAGE_BYTES / sizeof(Element));
    float* const weights =
        shared_part(reinterpret_cast<float*>(shared_memory + STAGES * STAGE_BYTES), WEIGHT_BYTES / 4);
    u64* const barriers =
        shared_part(reinterpret_cast<u64*>(shared_memory + STAGES * STAGE_BYTES + WEIGHT_BYTES), STAGES);
    const u32 full = shared_address(barriers);

    const int block_channel = blockIdx.x % CHANNEL_BLOCKS * BLOCK_CHANNELS;
    const int first = blockIdx.x / CHANNEL_BLOCKS, step = gridDim.x / CHANNEL_BLOCKS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, 1);
        fence_barrier_init();
        prefetch_map(map);
        wait_for_previous_launch();
        for (int i = 0; i < STAGES && first + i * step < tiles; ++i)
            load_window(shared_address(stages) + i * STAGE_BYTES, map, full + 8 * i, Tile(first + i * step),
                        block_channel);
    }
    if (!weights_ready) wait_for_previous_launch();
    load_weights(weights, weight, block_channel);
    const int lane = threadIdx.x % LANES, strip = threadIdx.x / LANES % STRIPS;
    const int band = threadIdx.x / (LANES * STRIPS) % BANDS, image = threadIdx.x / (LANES * STRIPS * BANDS);
    const int channel = block_channel + lane * VECTOR;
    const bool works = threadIdx.x < WORKERS && channel < CHANNELS;
    float channel_bias[VECTOR] = {};
#ifdef QUANTIZED
    const Finish finish(scale, bias, scales, works ? channel : 0);
#else
    if (HAS_BIAS && works) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) channel_bias[v] = to_float(bias[channel + v]);
    }
#endif
    wait_for_previous_launch();
    __syncthreads();

    const int corner = ((image * WINDOW_HEIGHT + band * ROWS * STRIDE_H) * WINDOW_WIDTH + strip * STRIP * STRIDE_W) *
                           BLOCK_CHANNELS + lane * VECTOR;
    int stage = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int index = first; index < tiles; index += step) {
        const Tile tile(index);
        const int row = tile.row + band * ROWS, column = tile.column + strip * STRIP;
        barrier_wait(full + 8 * stage, parity);
        if (works && tile.image + image < batch && row < OUTPUT_HEIGHT && column < OUTPUT_WIDTH) {
            float acc[ROWS][STRIP][VECTOR];
#pragma unroll
            for (int a = 0; a < ROWS; ++a)
#pragma unroll
                for (int p = 0; p < STRIP; ++p)
#pragma unroll
                    for (int v = 0; v < VECTOR; ++v) acc[a][p][v] = channel_bias[v];
            multiply_window(acc, stages + stage * (STAGE_BYTES / sizeof(Element)) + corner, weights + lane * VECTOR);
            const long long pixel =
                (1LL * (tile.image + image) * OUTPUT_HEIGHT + row) * OUTPUT_WIDTH + column;
            const long long at = pixel * Y_STEP + channel;
#pragma unroll
            for (int a = 0; a < ROWS; ++a) {
                if (OUTPUT_HEIGHT % ROWS && row + a >= OUTPUT_HEIGHT) break;
#pragma unroll
                for (int p = 0; p < STRIP; ++p)
                    if (OUTPUT_WIDTH % STRIP == 0 || column + p < OUTPUT_WIDTH)
#ifdef QUANTIZED
                        finish.store(y + at + a * OUTPUT_ROW + p * Y_STEP, residual + at + a * OUTPUT_ROW + p * Y_STEP,
                                     acc[a][p]);
#else
                        store(y + at + a * OUTPUT_ROW + p * Y_STEP, residual + at + a * OUTPUT_ROW + p * Y_STEP,
                              acc[a][p]);
#endif
            }
        }
        const int next = index + STAGES * step;
        if (next < tiles) {
            __syncthreads();  // all have read the stage
            if (threadIdx.x == 0)
                load_window(shared_address(stages) + stage * STAGE_BYTES, map, full + 8 * stage, Tile(next),
                            block_channel);
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}
