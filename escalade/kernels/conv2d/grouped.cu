// y[pixel][filter] = sum over taps and the channels of the filter's group of x[pixel at tap][c] * w[filter][tap][c]
//
// Persistent CTAs: each keeps the channels and weights of a few groups and loops over tiles of output pixels, copying
// the next window (halo included) while it multiplies this one. The window is stored as planes of 16 bytes per pixel (8
// channels of 16 bits or 4 of 32): an ldmatrix row whatever the tap, so a k-step takes any two such units.
// 32-bit elements are multiplied as TF32. PRODUCTS 3: fp32 accuracy, both operands split into two TF32 parts, the
// smallest of the four products is omitted; tensor cores round toward zero, so the sums of every PROMOTED steps are
// added to fp32 accumulators.
// Groups with fewer channels than a unit, or not a multiple of it, are multiplied BUNDLE at a time, with zero weights
// where filter and channel belong to different groups. The last CTA may have fewer groups (!BUNDLES_ALIGNED), padded
// with zeros. A zero times a NaN or infinity of another group is NaN, so every NaN is recomputed from its own group
// before it is stored.
// Limiter: memory; groups are small GEMMs.
//
// Rung: `grouped`. conv2d_input_gradient launches it over a gradient, with flipped filters.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                    // problem.dtype
constexpr int FILTER_HEIGHT = 5;          // problem.filter_height
constexpr int FILTER_WIDTH = 5;           // problem.filter_width
constexpr int STRIDE_H = 1;               // problem.stride[0]
constexpr int STRIDE_W = 1;               // problem.stride[1]
constexpr int DILATION_H = 1;             // problem.dilation[0]
constexpr int DILATION_W = 1;             // problem.dilation[1]
constexpr int GROUP_CHANNELS = 1;         // problem.group_channels
constexpr int GROUP_FILTERS = 1;          // problem.group_filters
constexpr int BUNDLE = 8;                 // tiling.bundle.groups
constexpr int BUNDLES = 1;                // config.bundles: bundles per CTA
constexpr bool BUNDLES_ALIGNED = true;    // problem.groups % (tiling.bundle.groups * config.bundles) == 0
constexpr int WARPS_M = 4;                // config.warps_m: warps that share the pixels of a bundle
constexpr int TILES_M = 2;                // config.tiles_m: 16-pixel blocks per warp
constexpr int TILE_IMAGES = 1;            // config.images: images per tile
constexpr int TILE_ROWS = 10;             // config.rows
constexpr int TILE_COLUMNS = 10;          // config.columns
constexpr int PITCH = 18;                 // config.pitch: row pitch of the window in pixels
constexpr bool REGISTER_WEIGHTS = false;  // tiling.register_weights
constexpr int BLOCKS_PER_SM = 4;          // config.blocks_per_sm
constexpr int PRODUCTS = 3;               // products
constexpr bool HAS_BIAS = true;           // problem.bias
constexpr bool HAS_RESIDUAL = false;      // problem.residual
constexpr bool HAS_RELU = false;          // problem.relu
#endif

#include "common/epilogue.cuh"
#include "common/mma_tile.cuh"

constexpr int UNIT = 16 / sizeof(Element);  // channels
constexpr int IN_REGISTER = 4 / sizeof(Element);
constexpr bool SPLIT = PRODUCTS == 3;
constexpr int PROMOTED = 4;  // k-steps between promotions, where operands are split
constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int DEPTH = BUNDLE * GROUP_CHANNELS, WIDTH = BUNDLE * GROUP_FILTERS;  // per bundle
constexpr int UNITS = DEPTH / UNIT, TILES_N = WIDTH / 8;
constexpr int DEEP = TAPS * UNITS, STEPS = (DEEP + 1) / 2;  // in units; two per k-step
constexpr int BLOCK_UNITS = BUNDLES * UNITS, BLOCK_FILTERS = BUNDLES * WIDTH;
constexpr int THREADS = BUNDLES * WARPS_M * 32;
constexpr int IMAGE_PIXELS = TILE_ROWS * TILE_COLUMNS, PIXELS = TILE_IMAGES * IMAGE_PIXELS;  // per tile
constexpr int PIXEL_STEP = WARPS_M * 16;
static_assert(DEPTH % UNIT == 0 && WIDTH % 8 == 0, "bundles are whole units");
static_assert(PIXELS <= TILES_M * PIXEL_STEP, "every pixel has a warp");

// Columns of the window are ordered by their remainder modulo the stride, so that adjacent outputs read adjacent
// columns.
constexpr int WINDOW_ROWS = (TILE_ROWS - 1) * STRIDE_H + (FILTER_HEIGHT - 1) * DILATION_H + 1;
constexpr int WINDOW_COLUMNS = (TILE_COLUMNS - 1) * STRIDE_W + (FILTER_WIDTH - 1) * DILATION_W + 1;
constexpr int PART = PITCH / STRIDE_W;
static_assert(PITCH % STRIDE_W == 0 && PITCH >= WINDOW_COLUMNS, "a row has room for every remainder");
// Adjacent threads copy to adjacent planes, which start in adjacent banks.
constexpr int PLANE_BYTES = (TILE_IMAGES * WINDOW_ROWS * PITCH * 16 + 127) / 128 * 128 + 16;
// A tile's results are staged in smem so that whole lines are stored; in fp32 if a residual is added on the way.
template <bool WIDE>
struct ResultOf {
    using Type = Element;
};
template <>
struct ResultOf<true> {
    using Type = float;
};
using Result = ResultOf<HAS_RESIDUAL>::Type;
// The pitch in bytes is an odd number of 16-byte chunks, so that rows written at once are in different banks.
constexpr int RESULT_CHUNKS = BLOCK_FILTERS * sizeof(Result) / 16, RESULT_PITCH = (RESULT_CHUNKS | 1) * 16;
constexpr int WINDOW_BYTES = BLOCK_UNITS * PLANE_BYTES, RESULT_BYTES = PIXELS * RESULT_PITCH;
constexpr int STAGE_BYTES = ((WINDOW_BYTES > RESULT_BYTES ? WINDOW_BYTES : RESULT_BYTES) + 127) / 128 * 128;
constexpr int PART_BYTES = BUNDLES * STEPS * TILES_N * 32 * 8, WEIGHT_BYTES = (SPLIT ? 2 : 1) * PART_BYTES;
constexpr int ZERO_BYTES = 128;

__device__ __forceinline__ constexpr int column_in_window(int column) {
    return column % STRIDE_W * PART + column / STRIDE_W;
}

// Offset of a k-unit in the window, relative to the pixel's.
__device__ __forceinline__ constexpr int unit_offset(int unit) {
    const int tap = unit / UNITS;
    const int pixel = tap / FILTER_WIDTH * DILATION_H * PITCH + column_in_window(tap % FILTER_WIDTH * DILATION_W);
    return unit % UNITS * PLANE_BYTES + pixel * 16;
}

struct Tile {  // first output pixel
    int image, row, column;
};

struct Pixel {  // of a tile
    int image, row, column;
    bool exists;
    long long output;  // index among all output pixels

    __device__ __forceinline__ static Pixel of(int number, Tile tile, const ConvShape& shape) {
        Pixel pixel;
        const int image = TILE_IMAGES == 1 ? 0 : number / IMAGE_PIXELS, within = number - image * IMAGE_PIXELS;
        pixel.image = tile.image + image;
        pixel.row = tile.row + within / TILE_COLUMNS, pixel.column = tile.column + within % TILE_COLUMNS;
        pixel.exists = number < PIXELS && (TILE_IMAGES == 1 || pixel.image < shape.batch) &&
                       pixel.row < shape.output_height && pixel.column < shape.output_width;
        pixel.output = (1LL * pixel.image * shape.output_height + pixel.row) * shape.output_width + pixel.column;
        return pixel;
    }
};

__device__ __forceinline__ int tile_count(const ConvShape& shape) {
    return (shape.batch + TILE_IMAGES - 1) / TILE_IMAGES * ((shape.output_height + TILE_ROWS - 1) / TILE_ROWS) *
           ((shape.output_width + TILE_COLUMNS - 1) / TILE_COLUMNS);
}

__device__ __forceinline__ Tile tile_at(int tile, const ConvShape& shape) {
    const int across = (shape.output_width + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int down = (shape.output_height + TILE_ROWS - 1) / TILE_ROWS;
    return {tile / across / down * TILE_IMAGES, tile / across % down * TILE_ROWS, tile % across * TILE_COLUMNS};
}

__device__ __forceinline__ bool is_between(int value, int end) {
    return static_cast<unsigned>(value) < static_cast<unsigned>(end);  // a negative value wraps to a large one
}

// True if the channel or filter exists; in the last CTA it may not.
__device__ __forceinline__ bool exists(int number, int all) { return BUNDLES_ALIGNED || number < all; }

// The weight as multiplied (TF32 if 32-bit); `low` receives the remainder.
template <class T>
__device__ __forceinline__ T rounded(T value, T&) { return value; }
template <>
__device__ __forceinline__ float rounded<float>(float value, float& low) {
    u32 bits = __float_as_uint(value);
    low = __uint_as_float(split_off_low(bits));
    return __uint_as_float(bits);
}

// The CTA's weights in fragment order: fragments[bundle][step][block of 8 filters][lane], two registers each. The low
// parts of split weights follow all high parts.
__device__ __forceinline__ void stage_weights(Element* fragments, const Element* weight, int first_filter,
                                              const ConvShape& shape) {
    constexpr int VECTOR = GROUP_CHANNELS % UNIT == 0 ? UNIT
                           : GROUP_CHANNELS % 4 == 0  ? 4
                           : GROUP_CHANNELS % 2 == 0  ? 2
                                                      : 1;
    constexpr int PARTS = UNIT / VECTOR;
    constexpr int PAIR = VECTOR < IN_REGISTER ? 1 : IN_REGISTER;
#pragma unroll 4
    for (int i = threadIdx.x; i < BLOCK_FILTERS * STEPS * 2 * PARTS; i += THREADS) {
        const int unit = i / PARTS % (STEPS * 2), filter = i / PARTS / (STEPS * 2);
        const int in_unit = i % PARTS * VECTOR, channel = unit % UNITS * UNIT + in_unit;
        const bool theirs = filter % WIDTH / GROUP_FILTERS == channel / GROUP_CHANNELS && unit < DEEP &&
                            exists(first_filter + filter, shape.filters);
        const long long at = (1LL * (first_filter + filter) * TAPS + unit / UNITS) * GROUP_CHANNELS;
        Pack<Element, VECTOR> pack = {};
        if (theirs) pack = load_pack<Element, VECTOR>(weight + at + channel % GROUP_CHANNELS);
        const int block = (filter / WIDTH * STEPS + unit / 2) * TILES_N + filter % WIDTH / 8;
#pragma unroll
        for (int v = 0; v < VECTOR; v += PAIR) {
            const int lane = filter % 8 * 4 + (in_unit + v) / IN_REGISTER;
            Pack<Element, PAIR> pair, low;
#pragma unroll
            for (int e = 0; e < PAIR; ++e) pair.at[e] = rounded(pack.at[v + e], low.at[e]);
            Element* const target =
                fragments + ((block * 32 + lane) * 2 + unit % 2) * IN_REGISTER + (in_unit + v) % IN_REGISTER;
            store_pack(target, pair);
            if (SPLIT) store_pack(target + PART_BYTES / sizeof(Element), low);
        }
    }
}

// A thread copies the same unit of the same column in several rows, so what depends on these is computed once. The
// thread index is re-read (thread_number), so that none of it occupies registers during the MMAs.
__device__ __forceinline__ void copy_window(u32 stage, const Element* x, Tile tile, int first_channel,
                                            const ConvShape& shape) {
    constexpr int LINE = WINDOW_COLUMNS * BLOCK_UNITS, ACROSS = LINE < THREADS ? LINE : THREADS;
    constexpr int TOGETHER = THREADS / ACROSS;  // rows in flight
    const int thread = thread_number();
    if (thread / ACROSS >= TOGETHER) return;
    const int first_row = tile.row * STRIDE_H - shape.pad_h, row_size = shape.width * shape.channels;
#pragma unroll 1
    for (int place = thread % ACROSS; place < LINE; place += ACROSS) {
        const int unit = place % BLOCK_UNITS, window_column = place / BLOCK_UNITS;
        const int column = tile.column * STRIDE_W - shape.pad_w + window_column;
        const bool column_inside =
            is_between(column, shape.width) && exists(first_channel + unit * UNIT, shape.channels);
        const Element* const top = x + (1LL * tile.image * shape.height + first_row) * row_size +
                                   (1LL * column * shape.channels + first_channel + unit * UNIT);
        const u32 target = stage + unit * PLANE_BYTES + column_in_window(window_column) * 16;
#pragma unroll 4
        for (int line = thread / ACROSS; line < TILE_IMAGES * WINDOW_ROWS; line += TOGETHER) {
            const int image = TILE_IMAGES == 1 ? 0 : line / WINDOW_ROWS, row = line - image * WINDOW_ROWS;
            const bool inside = column_inside && is_between(first_row + row, shape.height) &&
                                (TILE_IMAGES == 1 || tile.image + image < shape.batch);
            copy_async_16(target + line * PITCH * 16, top + (1LL * image * shape.height + row) * row_size, inside);
        }
    }
}

// One sum over the filter's own group only.
__device__ __forceinline__ float own_sum(const Element* x, const Element* weight, const Pixel& output, int filter,
                                         const ConvShape& shape) {
    const int first_channel = filter / GROUP_FILTERS * GROUP_CHANNELS;
    float sum = 0.f;
#pragma unroll 1
    for (int tap = 0; tap < TAPS; ++tap) {
        const int row = output.row * STRIDE_H - shape.pad_h + tap / FILTER_WIDTH * DILATION_H;
        const int column = output.column * STRIDE_W - shape.pad_w + tap % FILTER_WIDTH * DILATION_W;
        if (!is_between(row, shape.height) || !is_between(column, shape.width)) continue;
        const long long pixel = (1LL * output.image * shape.height + row) * shape.width + column;
        const Element* const inputs = x + pixel * shape.channels + first_channel;
        const Element* const weights = weight + (1LL * filter * TAPS + tap) * GROUP_CHANNELS;
#pragma unroll 1
        for (int c = 0; c < GROUP_CHANNELS; ++c) sum += to_float(inputs[c]) * to_float(weights[c]);
    }
    return sum;
}

__device__ __forceinline__ Result* result_at(unsigned char* results, int pixel, int filter) {
    return reinterpret_cast<Result*>(results + pixel * RESULT_PITCH) + filter;
}

__device__ __forceinline__ Result result_of(float sum, float bias) {
    if (HAS_BIAS) sum += bias;
    return from_float<Result>(HAS_RESIDUAL ? sum : activated<HAS_RELU>(sum));
}

// False if the sum behind a result may be NaN. Unlike ReLU, an activation may turn a NaN into a number.
__device__ __forceinline__ bool is_number(Result result) {
#ifdef EXPRESSION
    if (!HAS_RESIDUAL) return false;
#endif
    return to_float(result) == to_float(result);
}

// Recomputes the results of a tile that are, or may have been, NaN: another group may have caused it.
__device__ __forceinline__ void restore_nans(unsigned char* results, const Element* x, const Element* weight,
                                             const Element* bias, Tile tile, int first_filter, const ConvShape& shape) {
#pragma unroll 1
    for (int i = threadIdx.x; i < PIXELS * BLOCK_FILTERS; i += THREADS) {
        const int filter = i % BLOCK_FILTERS;
        const Pixel output = Pixel::of(i / BLOCK_FILTERS, tile, shape);
        Result& result = *result_at(results, i / BLOCK_FILTERS, filter);
        if (!output.exists || is_number(result) || !exists(first_filter + filter, shape.filters)) continue;
        result = result_of(own_sum(x, weight, output, first_filter + filter, shape),
                           HAS_BIAS ? to_float(bias[first_filter + filter]) : 0.f);
    }
}

// UNIT results for y: unchanged, or with the residual added.
template <class R>
__device__ __forceinline__ Pack<Element, UNIT> finished(const R* results, const Element* residual, long long at) {
    if constexpr (!HAS_RESIDUAL) {
        return load_pack<Element, UNIT>(results);
    } else {
        const Pack<Element, UNIT> added = load_pack<Element, UNIT>(residual + at);
        Pack<Element, UNIT> outputs;
#pragma unroll
        for (int e = 0; e < UNIT; e += 4) {
            const Pack<float, 4> four = load_pack<float, 4>(results + e);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                outputs.at[e + i] = finish<false, true, HAS_RELU, Element>(four.at[i], nullptr, 0, added.at, e + i);
        }
        return outputs;
    }
}

using Accumulators = float[TILES_M][TILES_N][4];

__device__ __forceinline__ void promote(Accumulators& acc, Accumulators& recent) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int j = 0; j < TILES_N; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][j][e] += recent[m][j][e], recent[m][j][e] = 0.f;
}

// MMAs of 16 pixels with one k-step of weights; `low` holds the low parts of split weights.
__device__ __forceinline__ void multiply_add_step(float (&acc)[TILES_N][4], u32 (&a)[4], const u32 (&b)[TILES_N][2],
                                                  const u32 (&low)[SPLIT ? TILES_N : 1][2]) {
    if constexpr (SPLIT) {
        u32 low_a[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) low_a[e] = split_off_low(a[e]);
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
            multiply_add<Element>(acc[j], low_a, b[j]);
            multiply_add<Element>(acc[j], a, low[j]);
        }
    } else if (sizeof(Element) == 4) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = to_tf32(__uint_as_float(a[e]));
    }
#pragma unroll
    for (int j = 0; j < TILES_N; ++j) multiply_add<Element>(acc[j], a, b[j]);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_grouped(const Element* x, const Element* weight, const Element* bias, const Element* residual, Element* y,
                   ConvShape shape, int weights_ready) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Element* const fragments = reinterpret_cast<Element*>(shared_memory);
    const u32 zeros = shared_address(shared_memory) + WEIGHT_BYTES;
    const u32 stages = zeros + ZERO_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int bundle = warp % BUNDLES, first_pixel = warp / BUNDLES * 16;  // then in steps of PIXEL_STEP

    const int channel_blocks = (shape.channels + BLOCK_UNITS * UNIT - 1) / (BLOCK_UNITS * UNIT);
    const int first_filter = blockIdx.x % channel_blocks * BLOCK_FILTERS;
    const int first_channel = blockIdx.x % channel_blocks * BLOCK_UNITS * UNIT;
    const int tiles = tile_count(shape);

    if (!weights_ready) wait_for_previous_launch();
    stage_weights(fragments, weight, first_filter, shape);
    if (threadIdx.x < ZERO_BYTES / 4) reinterpret_cast<u32*>(shared_memory + WEIGHT_BYTES)[threadIdx.x] = 0;

    // A lane's ldmatrix addresses: a pixel of each block of 16, and one of the two units of a step.
    u32 pixels[TILES_M], second_unit[STEPS];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
        int pixel = first_pixel + m * PIXEL_STEP + lane % 16;
        if (pixel >= PIXELS) pixel = 0;  // not stored
        const int image = pixel / IMAGE_PIXELS, within = pixel % IMAGE_PIXELS;
        const int row = image * WINDOW_ROWS + within / TILE_COLUMNS * STRIDE_H;
        pixels[m] = (row * PITCH + within % TILE_COLUMNS) * 16 + bundle * UNITS * PLANE_BYTES;
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        second_unit[step] = lane < 16 ? 0 : unit_offset(step * 2 + 1) - unit_offset(step * 2);

    const uint2* const lane_fragments =
        reinterpret_cast<const uint2*>(shared_memory) + bundle * STEPS * TILES_N * 32 + lane;
    const uint2* const lane_low = lane_fragments + PART_BYTES / 8;
    uint2 kept[REGISTER_WEIGHTS ? STEPS : 1][TILES_N];
    if (REGISTER_WEIGHTS) {
        __syncthreads();
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) kept[step][j] = lane_fragments[(step * TILES_N + j) * 32];
    }

    wait_for_previous_launch();  // returns at once if already waited for
    int number = blockIdx.x / channel_blocks;
    const int workers = gridDim.x / channel_blocks;
    int stage_number = 0;
    if (number < tiles) copy_window(stages, x, tile_at(number, shape), first_channel, shape);
    copy_async_commit();
#pragma unroll 1
    for (; number < tiles; number += workers) {
        const u32 stage = stages + stage_number * STAGE_BYTES;
        copy_async_wait<0>();
        __syncthreads();  // this window has arrived, and the results in the other stage are stored
        if (number + workers < tiles)
            copy_window(stages + (1 - stage_number) * STAGE_BYTES, x, tile_at(number + workers, shape), first_channel,
                        shape);
        copy_async_commit();

        __align__(16) Accumulators acc = {}, recent = {};  // aligned for the CPU, which clears 16 bytes at once
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 b[TILES_N][2];
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
                const uint2 pair = REGISTER_WEIGHTS ? kept[REGISTER_WEIGHTS ? step : 0][j]
                                                    : lane_fragments[(step * TILES_N + j) * 32];
                b[j][0] = pair.x, b[j][1] = pair.y;
            }
            u32 low[SPLIT ? TILES_N : 1][2];
            if (SPLIT) {
#pragma unroll
                for (int j = 0; j < TILES_N; ++j) {
                    const uint2 pair = lane_low[(step * TILES_N + j) * 32];
                    low[SPLIT ? j : 0][0] = pair.x, low[SPLIT ? j : 0][1] = pair.y;
                }
            }
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
                constexpr int BLOCKS = (PIXELS + 15) / 16;  // a warp may have one fewer than another
                if ((m + 1) * WARPS_M > BLOCKS && first_pixel + m * PIXEL_STEP >= PIXELS) continue;
                u32 a[4], at = stage + pixels[m] + unit_offset(step * 2) + second_unit[step];
                if (step * 2 + 1 >= DEEP && lane >= 16) at = zeros;
                load_matrices(a, at);
                multiply_add_step(SPLIT ? recent[m] : acc[m], a, b, low);
            }
            if (SPLIT && (step % PROMOTED == PROMOTED - 1 || step == STEPS - 1)) promote(acc, recent);
        }
        __syncthreads();  // the window has been read: results reuse its smem

        const Tile tile = tile_at(number, shape);
        unsigned char* const results = shared_memory + WEIGHT_BYTES + ZERO_BYTES + stage_number * STAGE_BYTES;
        const int lane_pixel = anew(first_pixel + lane / 4);
        const int lane_filter = bundle * WIDTH + lane % 4 * 2;
        float biases[TILES_N][2] = {};
        if (HAS_BIAS) {
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
                if (!exists(first_filter + lane_filter + j * 8, shape.filters)) continue;
                const Pack<Element, 2> pair = load_pack<Element, 2>(bias + first_filter + lane_filter + j * 8);
                biases[j][0] = to_float(pair.at[0]), biases[j][1] = to_float(pair.at[1]);
            }
        }
        float total = 0.f;  // NaN if any of them is
#pragma unroll
        for (int m = 0; m < TILES_M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int pixel = lane_pixel + m * PIXEL_STEP + half * 8;
                if ((m + 1) * PIXEL_STEP > PIXELS && pixel >= PIXELS) continue;
#pragma unroll
                for (int j = 0; j < TILES_N; ++j) {
                    Pack<Result, 2> pair;
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float sum = acc[m][j][half * 2 + e];
                        if (BUNDLE > 1) total += sum;
                        pair.at[e] = result_of(sum, biases[j][e]);
                    }
                    store_pack(result_at(results, pixel, lane_filter + j * 8), pair);
                }
            }
        if (__syncthreads_or(BUNDLE > 1 && total != total)) {
            restore_nans(results, x, weight, bias, tile, first_filter, shape);
            __syncthreads();
        }

        constexpr int CHUNKS = BLOCK_FILTERS / UNIT;
#pragma unroll 2
        for (int i = thread_number(); i < PIXELS * CHUNKS; i += THREADS) {
            const int filter = i % CHUNKS * UNIT;
            const Pixel output = Pixel::of(i / CHUNKS, tile, shape);
            if (!output.exists || !exists(first_filter + filter, shape.filters)) continue;
            const long long at = output.output * shape.filters + first_filter + filter;
            store_pack(y + at, finished(result_at(results, i / CHUNKS, filter), residual, at));
        }
        stage_number = 1 - stage_number;
    }
}
