// parts[part][k][r][s][c] = sum over the part's output pixels p of gradient[p][k] * x[window(p, r, s)][c], in NHWC; if
// there is one part, the results (conv2d_weight_gradient/sums.cuh)
//
// A GEMM on mma.sync: rows are the filters of a group, columns its taps times channels, and k is pixels. cp.async copies
// k-tiles of both operands into a ring of STAGES, a row per pixel as stored; ldmatrix transposes 16-bit operands. Copies
// are as wide as the channels allow, down to one word, and below that through registers. A thread copies the same columns,
// so the same tap, of every k-tile; a table in smem says where the windows of the tile's pixels begin.
//   HAS_BIAS  the first tile of columns adds the products of the gradients with ones
//   PRODUCTS  3: fp32 accuracy, operands split into two TF32 parts; tensor cores round toward zero, so the sums of a few
//             steps are added to fp32 accumulators
// Limiter: memory; with many taps, copies to smem.
//
// Rung: `tensor_core`.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr bool HAS_BIAS = true;   // problem.bias
constexpr int PRODUCTS = 3;       // products
constexpr int GROUPS = 1;         // forward.groups
constexpr int CHANNELS = 64;      // forward.group_channels
constexpr int FILTERS = 64;       // forward.group_filters
constexpr int FILTER_HEIGHT = 3;  // forward.filter_height
constexpr int FILTER_WIDTH = 3;   // forward.filter_width
constexpr int STRIDE_H = 1;       // forward.stride[0]
constexpr int STRIDE_W = 1;       // forward.stride[1]
constexpr int PAD_H = 1;          // forward.padding[0]
constexpr int PAD_W = 1;          // forward.padding[1]
constexpr int DILATION_H = 1;     // forward.dilation[0]
constexpr int DILATION_W = 1;     // forward.dilation[1]
constexpr int TILE_FILTERS = 64;  // config.filters
constexpr int TILE_COLUMNS = 64;  // config.columns
constexpr int PIXELS = 32;        // config.pixels: per k-tile
constexpr int STAGES = 3;         // config.stages
constexpr int BLOCKS_PER_SM = 2;  // config.blocks_per_sm
constexpr bool DIRECT = false;    // direct
#endif

#include "common/elements.cuh"
#include "common/mma_tile.cuh"
#include "common/ptx.cuh"
#include "conv2d_weight_gradient/sums.cuh"

constexpr int COLUMNS = FILTER_HEIGHT * FILTER_WIDTH * CHANNELS;  // of a group
constexpr int FILTER_TILES = (FILTERS + TILE_FILTERS - 1) / TILE_FILTERS;
constexpr int COLUMN_TILES = (COLUMNS + TILE_COLUMNS - 1) / TILE_COLUMNS;
constexpr long long WEIGHTS = 1LL * GROUPS * FILTERS * COLUMNS;
constexpr bool POINTWISE = FILTER_HEIGHT * FILTER_WIDTH == 1 && STRIDE_H * STRIDE_W == 1 && PAD_H + PAD_W == 0;
constexpr bool PAIRS = COLUMNS % 2 == 0 && (DIRECT || !HAS_BIAS || GROUPS * FILTERS % 2 == 0);  // stored at once

constexpr int TILES_M = TILE_FILTERS / 32, TILES_N = 4;  // blocks of 16 filters and of 8 columns per warp
constexpr int WARPS_M = 2, THREADS = WARPS_M * TILE_COLUMNS;
constexpr int STEP = STEP_BYTES / sizeof(Element);  // pixels per MMA
constexpr int PROMOTED = 4;                         // steps between promotions, where operands are split
constexpr int GAP = 8;  // elements between rows; in 16 and in 32 bits, what a warp reads at once is in different banks
constexpr int GRADIENT_PITCH = TILE_FILTERS + GAP, X_PITCH = TILE_COLUMNS + GAP;
constexpr int X_AT = PIXELS * GRADIENT_PITCH, STAGE_ELEMENTS = X_AT + PIXELS * X_PITCH;
static_assert(PIXELS % STEP == 0 && THREADS >= PIXELS, "a thread per window, and no partial step");

struct Window {  // of x, for one output pixel
    long long image;  // first pixel
    int row, column;
};

__device__ __forceinline__ bool is_between(int value, int end) {
    return static_cast<unsigned>(value) < static_cast<unsigned>(end);  // a negative value wraps to a large one
}

template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const Element* from, bool inside) {
    if constexpr (BYTES == 16) copy_async_16(to, from, inside);
    else if constexpr (BYTES == 8) copy_async_8(to, from, inside);
    else copy_async_4(to, from, inside);
}

// The columns that a thread copies of one operand: UNIT adjacent elements of a row, and of every STRIDE-th row.
template <int ELEMENTS_PER_GROUP, int TILE>
struct Share {
    static constexpr int ROW_BYTES = ELEMENTS_PER_GROUP * sizeof(Element);
    static constexpr int BYTES = ROW_BYTES % 16 == 0 ? 16 : ROW_BYTES % 8 == 0 ? 8 : ROW_BYTES % 4 == 0 ? 4 : 2;
    static constexpr int UNIT = BYTES / sizeof(Element), UNITS = TILE / UNIT, STRIDE = THREADS / UNITS;
    static_assert(THREADS % UNITS == 0, "threads copy whole rows at once");
    int row = threadIdx.x / UNITS, column = threadIdx.x % UNITS * UNIT;
};

// A thread's elements of a k-tile that are too narrow for cp.async, on their way to smem.
template <typename Share>
struct Held {
    Element rows[Share::BYTES < 4 ? PIXELS / Share::STRIDE : 1];
};

// Starts to copy a thread's share of a k-tile; source(row, inside) is where a row begins.
template <int PITCH, typename Share, typename Source>
__device__ __forceinline__ void load_rows(const Share& share, u32 to, Held<Share>& held, const Source& source) {
    if constexpr (Share::BYTES >= 4) {
#pragma unroll
        for (int row = share.row; row < PIXELS; row += Share::STRIDE) {
            bool inside;
            const Element* const from = source(row, inside);
            copy_async<Share::BYTES>(to + (row * PITCH + share.column) * sizeof(Element), from, inside);
        }
    } else {
#pragma unroll
        for (int i = 0; i < PIXELS / Share::STRIDE; ++i) {
            bool inside;
            const Element* const from = source(share.row + i * Share::STRIDE, inside);
            held.rows[i] = from_float<Element>(0.f);
            if (inside) held.rows[i] = *from;
        }
    }
}

template <int PITCH, typename Share>
__device__ __forceinline__ void store_rows(const Share& share, Element* to, const Held<Share>& held) {
    if constexpr (Share::BYTES < 4)
#pragma unroll
        for (int i = 0; i < PIXELS / Share::STRIDE; ++i)
            to[(share.row + i * Share::STRIDE) * PITCH + share.column] = held.rows[i];
}

using GradientShare = Share<FILTERS, TILE_FILTERS>;
using XShare = Share<CHANNELS, TILE_COLUMNS>;

struct Tile {
    int group, filter, column;  // the first filter and column, relative to the group's

    __device__ __forceinline__ explicit Tile(int index)
        : group(index / (FILTER_TILES * COLUMN_TILES)), filter(index / COLUMN_TILES % FILTER_TILES * TILE_FILTERS),
          column(index % COLUMN_TILES * TILE_COLUMNS) {}
};

struct Copies {
    const Element *gradient, *x;  // a thread's first column of pixel 0
    const ConvShape& shape;
    Window (*windows)[PIXELS];  // of two k-tiles
    Element* stages;
    u32 address;  // of the stages
    GradientShare of_gradient;
    XShare of_x;
    Held<GradientShare> held_gradient;
    Held<XShare> held_x;
    bool has_filter, has_column;
    int down, across;  // from a window's corner to the thread's tap

    __device__ __forceinline__ Copies(const Element* gradients, const Element* images, const ConvShape& shape,
                                      const Tile& tile, Window (*windows)[PIXELS], Element* stages)
        : shape(shape), windows(windows), stages(stages), address(shared_address(stages)) {
        const int filter = tile.filter + of_gradient.column, column = tile.column + of_x.column;
        has_filter = filter < FILTERS, has_column = column < COLUMNS;
        const int tap = column / CHANNELS;
        down = tap / FILTER_WIDTH * DILATION_H, across = tap % FILTER_WIDTH * DILATION_W;
        gradient = gradients + tile.group * FILTERS + filter;
        x = images + tile.group * CHANNELS + column % CHANNELS;
    }

    // Computes where the windows of a k-tile begin.
    __device__ __forceinline__ void place(int k_tile) const {
        if (POINTWISE || threadIdx.x >= PIXELS) return;
        const long long image_pixels = 1LL * shape.output_height * shape.output_width;
        const long long pixel = 1LL * k_tile * PIXELS + threadIdx.x, image = pixel / image_pixels;
        const int within = static_cast<int>(pixel - image * image_pixels);
        const int row = image < shape.batch ? within / shape.output_width * STRIDE_H - PAD_H : -(1 << 30);  // outside
        windows[k_tile % 2][threadIdx.x] = {image * shape.height * shape.width, row,
                                            within % shape.output_width * STRIDE_W - PAD_W};
    }

    __device__ __forceinline__ void load(int stage, int k_tile) {
        const long long first = 1LL * k_tile * PIXELS;
        const long long pixels = 1LL * shape.batch * shape.output_height * shape.output_width;
        const u32 to = address + stage * STAGE_ELEMENTS * sizeof(Element);
        const auto gradient_row = [&](int row, bool& inside) {
            inside = has_filter && first + row < pixels;
            return inside ? gradient + (first + row) * (GROUPS * FILTERS) : gradient;
        };
        const auto x_row = [&](int row, bool& inside) {
            long long pixel = first + row;
            inside = has_column && pixel < pixels;
            if (!POINTWISE) {
                const Window window = windows[k_tile % 2][row];
                const int h = window.row + down, w = window.column + across;
                inside = has_column && is_between(h, shape.height) && is_between(w, shape.width);
                pixel = window.image + 1LL * h * shape.width + w;
            }
            return inside ? x + pixel * (GROUPS * CHANNELS) : x;
        };
        load_rows<GRADIENT_PITCH>(of_gradient, to, held_gradient, gradient_row);
        load_rows<X_PITCH>(of_x, to + X_AT * sizeof(Element), held_x, x_row);
    }

    // Stores what `load` holds, after work that hides its latency.
    __device__ __forceinline__ void store(int stage) const {
        Element* const to = stages + stage * STAGE_ELEMENTS;
        store_rows<GRADIENT_PITCH>(of_gradient, to, held_gradient);
        store_rows<X_PITCH>(of_x, to + X_AT, held_x);
    }
};

// One step of a warp's operands. In smem both have a row per pixel, so k is the slow dimension.
__device__ __forceinline__ void load_fragments(Fragments<TILES_M, TILES_N>& now, const Element* gradient,
                                               const Element* x) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(Element) == 2) {
        const int a = (lane / 16 * 8 + lane % 8) * GRADIENT_PITCH + lane / 8 % 2 * 8;
        const int b = (lane / 8 % 2 * 8 + lane % 8) * X_PITCH + lane / 16 * 8;
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) load_matrices_transposed(now.a[i], shared_address(gradient + a + i * 16));
#pragma unroll
        for (int j = 0; j < TILES_N; j += 2) {
            u32 two_blocks[4];
            load_matrices_transposed(two_blocks, shared_address(x + b + j * 8));
            now.b[j][0] = two_blocks[0], now.b[j][1] = two_blocks[1];
            now.b[j + 1][0] = two_blocks[2], now.b[j + 1][1] = two_blocks[3];
        }
    } else {
#pragma unroll
        for (int i = 0; i < TILES_M; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                now.a[i][e] = __float_as_uint(
                    to_float(gradient[(lane % 4 + e / 2 * 4) * GRADIENT_PITCH + i * 16 + e % 2 * 8 + lane / 4]));
#pragma unroll
        for (int j = 0; j < TILES_N; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                now.b[j][e] = __float_as_uint(to_float(x[(lane % 4 + e * 4) * X_PITCH + j * 8 + lane / 4]));
    }
}

__device__ __forceinline__ u32 ones() {
    Pack<Element, 4 / sizeof(Element)> pack;
#pragma unroll
    for (Element& one : pack.at) one = from_float<Element>(1.f);
    u32 word;
    memcpy(&word, &pack, 4);
    return word;
}

struct Accumulators {
    float of[TILES_M][TILES_N][4] = {}, of_ones[TILES_M][1][4] = {};

    __device__ __forceinline__ void multiply_add_step(Fragments<TILES_M, TILES_N>& now, bool with_ones) {
        if constexpr (PRODUCTS == 3) {
            Fragments<TILES_M, 1> bias;
            if (HAS_BIAS && with_ones) {
                memcpy(bias.a, now.a, sizeof(now.a));
                bias.b[0][0] = bias.b[0][1] = ones();
                multiply_add_split(of_ones, bias);
            }
            multiply_add_split(of, now);
        } else {
            if (sizeof(Element) == 4) now.round_to_tf32();
            const u32 all_ones[1][2] = {{ones(), ones()}};
            if (HAS_BIAS && with_ones) multiply_add<Element>(of_ones, now.a, all_ones);
            multiply_add<Element>(of, now.a, now.b);
        }
    }

    __device__ __forceinline__ void take(Accumulators& more) {
#pragma unroll
        for (int i = 0; i < TILES_M; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
#pragma unroll
                for (int j = 0; j < TILES_N; ++j) of[i][j][e] += more.of[i][j][e], more.of[i][j][e] = 0.f;
                of_ones[i][0][e] += more.of_ones[i][0][e], more.of_ones[i][0][e] = 0.f;
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_weight_gradient_tensor_core(const Element* __restrict__ x, const Element* __restrict__ gradients,
                                       Sum* __restrict__ parts, Sum* __restrict__ bias_gradient, ConvShape shape,
                                       int part_tiles) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Element* const stages = shared_part(reinterpret_cast<Element*>(shared_memory), STAGES * STAGE_ELEMENTS);
    auto windows = reinterpret_cast<Window(*)[PIXELS]>(
        shared_part(shared_memory + STAGES * STAGE_ELEMENTS * sizeof(Element), REST));
    const Tile tile(blockIdx.x);
    Copies copies(gradients, x, shape, tile, windows, stages);
    const long long pixels = 1LL * shape.batch * shape.output_height * shape.output_width;
    const int first = blockIdx.y * part_tiles;
    const int end = min(first + part_tiles, static_cast<int>((pixels + PIXELS - 1) / PIXELS));

    wait_for_previous_launch();
    for (int i = 0; i < STAGES - 1; ++i) {
        copies.place(first + i);
        __syncthreads();
        if (first + i < end) {
            copies.load(i, first + i);
            copies.store(i);
        }
        copy_async_commit();
    }
    copies.place(first + STAGES - 1);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_filter = warp % WARPS_M * TILES_M * 16, warp_column = warp / WARPS_M * TILES_N * 8;
    const bool with_ones = HAS_BIAS && tile.column == 0 && warp_column == 0;
    Accumulators acc, recent;
    int stage = 0;
#pragma unroll 1
    for (int k_tile = first; k_tile < end; ++k_tile) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();  // this k-tile is in smem, the last one's stage has been read, and the next windows are placed
        const int next = k_tile + STAGES - 1, next_stage = stage == 0 ? STAGES - 1 : stage - 1;
        if (next < end) copies.load(next_stage, next);
        copy_async_commit();
        copies.place(next + 1);
        const Element* const from = stages + stage * STAGE_ELEMENTS;
#pragma unroll
        for (int step = 0; step < PIXELS / STEP; ++step) {
            Fragments<TILES_M, TILES_N> now;
            load_fragments(now, from + step * STEP * GRADIENT_PITCH + warp_filter,
                           from + X_AT + step * STEP * X_PITCH + warp_column);
            if constexpr (PRODUCTS == 3) {
                recent.multiply_add_step(now, with_ones);
                if (step % PROMOTED == PROMOTED - 1 || step == PIXELS / STEP - 1) acc.take(recent);
            } else {
                acc.multiply_add_step(now, with_ones);
            }
        }
        if (next < end) copies.store(next_stage);
        if (++stage == STAGES) stage = 0;
    }

    const Sums own(parts, bias_gradient, blockIdx.y, WEIGHTS, GROUPS * FILTERS);
#pragma unroll
    for (int i = 0; i < TILES_M; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int in_group = tile.filter + warp_filter + i * 16 + half * 8 + lane / 4;
            if (in_group >= FILTERS) continue;
            const int filter = tile.group * FILTERS + in_group;
            if (with_ones && lane % 4 == 0 && own.bias != nullptr)
                own.bias[filter] = from_float<Sum>(acc.of_ones[i][0][half * 2]);
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
                const int column = tile.column + warp_column + j * 8 + lane % 4 * 2;
                Sum* const to = own.weights + 1LL * filter * COLUMNS + column;
                const float low = acc.of[i][j][half * 2], high = acc.of[i][j][half * 2 + 1];
                if (PAIRS) {
                    if (column < COLUMNS) store_pack(to, Pack<Sum, 2>{{from_float<Sum>(low), from_float<Sum>(high)}});
                } else {
                    if (column < COLUMNS) to[0] = from_float<Sum>(low);
                    if (column + 1 < COLUMNS) to[1] = from_float<Sum>(high);
                }
            }
        }
}
