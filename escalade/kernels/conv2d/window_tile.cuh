// A tile of output pixels whose whole window is in smem, for all taps to read in place.
//
// Number the window's pixels across its rows, WINDOW_WIDTH each: at tap (r, s), output pixel v reads pixel v + r *
// DILATION_H * WINDOW_WIDTH + s * DILATION_W. So the operand of a tap is the same smem with a shifted start. Columns
// where windows wrap into the next row hold garbage and are not stored.
// TILE_IMAGES small images are stacked in one tile. Their padding separates them: what runs past the end of a row meets
// the zeros left of the next one; past the end of an image, the zeros above the next image.
//
// Filters are the 64 rows of the MMA, pixels its WGMMA_N columns; TILE_ROWS x TILE_COLUMNS of them are useful. Results
// leave and residuals arrive through a staging tile in smem by TMA: 128 bytes of filters per pixel, 32-bit elements in
// two halves. HAS_MASK: the mask is passed in place of the residual, and passes a sum where it is positive (the
// gradient of a ReLU).
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // tiling.conv.windows.dtype
using Bias = float;                   // "fp32" if tiling.conv.windows.element_bytes == 1 else tiling.conv.windows.dtype
#define CHANNEL_BYTES 128             // tiling.row_bytes: channels per pixel or filter tap, the swizzle span
constexpr int FILTER_HEIGHT = 3;      // tiling.conv.windows.taps[0]
constexpr int FILTER_WIDTH = 3;       // tiling.conv.windows.taps[1]
constexpr int DILATION_H = 1;         // tiling.conv.windows.dilation[0]
constexpr int DILATION_W = 1;         // tiling.conv.windows.dilation[1]
constexpr int TILE_ROWS = 8;          // tiling.rows
constexpr int TILE_COLUMNS = 8;       // tiling.columns
constexpr int TILE_IMAGES = 1;        // tiling.images
constexpr bool ONE_BOX = true;        // tiling.one_box: a tile is stored in one box
constexpr int WGMMA_N = 16;           // tiling.width
constexpr bool MN_MAJOR = false;      // tiling.conv.windows.mn_major is not None
constexpr bool HAS_BIAS = false;      // tiling.conv.epilogue.bias
constexpr bool HAS_RESIDUAL = false;  // tiling.conv.epilogue.residual
constexpr bool HAS_RELU = false;      // tiling.conv.epilogue.relu
constexpr bool HAS_MASK = false;      // tiling.conv.epilogue.mask
#endif

#include "common/bytes.cuh"
#include "common/epilogue.cuh"
#include "common/pairs.cuh"
#include "common/hopper.cuh"
#include "common/ping_pong.cuh"
#include "common/wgmma_widths.cuh"

constexpr int THREADS = 384;
constexpr int CONSUMERS = 2;
constexpr int FILTERS = 64;     // per tile
constexpr int ROW_BYTES = CHANNEL_BYTES;
constexpr int K_TILE = ROW_BYTES / sizeof(Element);
constexpr int TAP_BYTES = FILTERS * ROW_BYTES;
constexpr int REACH_H = (FILTER_HEIGHT - 1) * DILATION_H, REACH_W = (FILTER_WIDTH - 1) * DILATION_W;
constexpr bool STACKED = TILE_IMAGES > 1;
constexpr int WINDOW_WIDTH = TILE_COLUMNS + REACH_W / (STACKED ? 2 : 1);
constexpr int WINDOW_PIXELS = (TILE_ROWS + REACH_H / (STACKED ? 2 : 1)) * WINDOW_WIDTH;  // per image
constexpr int WINDOW_BYTES = TILE_IMAGES * WINDOW_PIXELS * ROW_BYTES;
// The last columns' last tap reads past the window: those bytes are zero.
constexpr int READ_BYTES = (WGMMA_N + REACH_H * WINDOW_WIDTH + REACH_W) * ROW_BYTES;
constexpr int WINDOW_STAGE_BYTES = ((READ_BYTES > WINDOW_BYTES ? READ_BYTES : WINDOW_BYTES) + 1023) / 1024 * 1024;
enum : int { STAGED_ROW = sizeof(Element) == 1 ? 64 : 128 };  // bytes of filters per pixel
constexpr int HALF_BYTES = WGMMA_N * STAGED_ROW, HALVES = sizeof(Element) == 4 ? 2 : 1;
constexpr int STAGING_BYTES = HALVES * HALF_BYTES;
constexpr int STAGING_TILES = CONSUMERS / HALVES;  // 32-bit: both consumers take turns with one
constexpr bool SHARED_STAGING = STAGING_TILES == 1;
static_assert(HALF_BYTES % 1024 == 0, "the swizzle repeats every 1024 bytes");
constexpr int BLOCKS = WGMMA_N / 8;  // of 8 pixels
constexpr bool HAS_AUX = HAS_RESIDUAL || HAS_MASK;  // auxiliary tensor of y's shape
static_assert(!HAS_MASK || !(HAS_BIAS || HAS_RESIDUAL || HAS_RELU), "a mask excludes bias, residual and ReLU");
using Sum = SumOf<Element>::Type;
using Accumulators = Sum[WGMMA_N / 2];

// A tile as wide as the image is stored as one TMA box, which clips the last columns. A narrower tile has neighbors
// there, so each row is its own box, unless windows do not exceed their tile. Stacked images form one box including the
// gaps between them, which are clipped too.
constexpr int BOX_COLUMNS = ONE_BOX ? WINDOW_WIDTH : TILE_COLUMNS;
constexpr int BOX_PIXELS = STACKED ? TILE_IMAGES * WINDOW_PIXELS : (ONE_BOX ? TILE_ROWS : 1) * BOX_COLUMNS;
constexpr int BOX_BYTES = BOX_PIXELS * STAGED_ROW;
constexpr int TILE_PIXELS = STACKED ? BOX_PIXELS : (TILE_ROWS - 1) * WINDOW_WIDTH + BOX_COLUMNS;  // including gaps
static_assert(TILE_PIXELS <= WGMMA_N, "a tile fits one MMA");
static_assert(!STACKED || ONE_BOX, "stacked images are whole");

struct WindowShape {
    int batch, channels;                               // (windows.batch, windows.channels)
    int output_height, output_width;                   // windows.output
    int pad_h, pad_w;                                  // windows.padding
    int row_tiles, column_tiles, tiles, filter_tiles;  // tiling.counts
    int shortcut_channels;                             // tiling.conv.shortcut_channels
};

struct Tile {
    int image, row, column;  // of the first output pixel
    int filter;              // first

    __device__ __forceinline__ Tile(const WindowShape& shape, int index, int filter) : filter(filter) {
        column = index % shape.column_tiles * TILE_COLUMNS;
        index /= shape.column_tiles;
        row = index % shape.row_tiles * TILE_ROWS;
        image = index / shape.row_tiles * TILE_IMAGES;
    }
};

__device__ __forceinline__ void load_window(u32 to, const TensorMap& map, u32 full, const WindowShape& shape,
                                            const Tile& tile, int channel) {
    barrier_expect(full, WINDOW_BYTES);
    tma_load_4d(to, map, full, channel, tile.column - shape.pad_w, tile.row - shape.pad_h, tile.image);
}

// Loads the weights of one tap: 64 filters by a k-tile of channels; the barrier already expects the bytes. MN_MAJOR:
// weights are [channels][filters] with the taps reversed, those of the convolution this one is the gradient of.
__device__ __forceinline__ void load_weights(u32 to, const TensorMap& map, u32 full, int channel, int tap, int filter) {
    if constexpr (sizeof(Element) == 1)  // in an order in which a lane's two rows are adjacent filters
        tma_load_4d(to, map, full, tap * K_TILE + channel, 0, 0, filter / 16);
    else if constexpr (MN_MAJOR)
        tma_load_4d(to, map, full, filter, FILTER_WIDTH - 1 - tap % FILTER_WIDTH,
                    FILTER_HEIGHT - 1 - tap / FILTER_WIDTH, channel);
    else
        tma_load_3d(to, map, full, channel, tap, filter);
}

// Zero-fills bytes that MMAs or the epilogue read but no copy writes: copies fill at least FILLED bytes of a stage.
template <int STAGES, int FILLED = WINDOW_BYTES, int STAGING_TILES_HERE = STAGING_TILES>
__device__ __forceinline__ void clear_gaps(u32 windows, u32 staging_tiles) {
    const float4 zeros = make_float4(0.f, 0.f, 0.f, 0.f);
    if (READ_BYTES > FILLED)
        for (int stage = 0; stage < STAGES; ++stage)
            for (int byte = FILLED + threadIdx.x * 16; byte < READ_BYTES; byte += THREADS * 16)
                store_shared(windows + stage * WINDOW_STAGE_BYTES + byte, zeros);
    if (HAS_AUX && (ONE_BOX ? BOX_PIXELS : TILE_ROWS * BOX_COLUMNS) < WGMMA_N)
        for (int byte = threadIdx.x * 16; byte < STAGING_TILES_HERE * STAGING_BYTES; byte += THREADS * 16)
            store_shared(staging_tiles + byte, zeros);
    fence_async_proxy();
}

// Biases of the two filters that a lane holds of its warp's 16.
template <class Stored>
struct FilterConstants {
    float of[2] = {};

    __device__ __forceinline__ FilterConstants(const Bias* bias, int first_filter, const float* = nullptr,
                                               const float* = nullptr) {
        if (HAS_BIAS)
            for (int half = 0; half < 2; ++half)
                of[half] = to_float(bias[first_filter + threadIdx.x / 32 % 4 * 16 + 8 * half + threadIdx.x % 32 / 4]);
    }
    __device__ __forceinline__ float2 add(float first, float second, int half) const {
        return HAS_BIAS ? make_float2(first + of[half], second + of[half]) : make_float2(first, second);
    }
};

// In 8 bits the two filters are adjacent, and have scales: see finish_scaled.
template <>
struct FilterConstants<s8> {
    float bias[2], scale[2], residual_scale, result_scale;

    __device__ __forceinline__ FilterConstants(const Bias* biases, int first_filter, const float* of_filters,
                                               const float* scales)
        : residual_scale(HAS_RESIDUAL ? scales[0] : 1.f), result_scale(scales[1]) {
        const int filter = first_filter + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 * 2;
        for (int i = 0; i < 2; ++i) {
            scale[i] = of_filters[filter + i];
            bias[i] = HAS_BIAS ? to_float(biases[filter + i]) : 0.f;
        }
#ifndef EXPRESSION  // the results are in 128ths with a ReLU, which saturation includes
        const float factor = result_scale * (HAS_RELU ? 1.f / 128.f : 1.f);
        residual_scale *= factor;
        for (int i = 0; i < 2; ++i) scale[i] *= factor, bias[i] *= factor;
#endif
    }

    // Two pixels of both filters, in a word of adjacent filters; so are the residuals. Sums are those of the first filter,
    // then of the second.
    __device__ __forceinline__ u32 finished(const float (&sums)[4], u32 residuals) const {
        float values[4], added[4] = {};
        if (HAS_RESIDUAL) to_floats(added, Pack<s8, 4>{{residuals}});
#pragma unroll
        for (int e = 0; e < 4; ++e) {  // pixel e / 2 of filter e % 2
            const float sum = sums[e % 2 * 2 + e / 2];
#ifdef EXPRESSION
            values[e] = finish_scaled<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(sum, scale[e % 2], bias[e % 2], added[e],
                                                                        residual_scale, result_scale);
#else
            values[e] = HAS_BIAS ? fmaf(sum, scale[e % 2], bias[e % 2]) : sum * scale[e % 2];
            if (HAS_RESIDUAL) values[e] = fmaf(added[e], residual_scale, values[e]);
            if (HAS_RELU) values[e] = __saturatef(values[e]);
#endif
        }
        if constexpr (HAS_RELU) return s8x4_of_parts(values);
        Pack<s8, 4> pack;
        from_floats(pack, values);
        return pack.words[0];
    }
};
using Biases = FilterConstants<Element>;

// Two pixels of one filter.
__device__ __forceinline__ float2 finish_pair(float2 values, float2 aux_values) {
    if (HAS_MASK)  // as PyTorch does: NaN in the mask passes the gradient
        values = {aux_values.x <= 0.f ? 0.f : values.x, aux_values.y <= 0.f ? 0.f : values.y};
    return activated_pair<HAS_RESIDUAL, HAS_RELU>(values, aux_values);
}

// Epilogue of COUNT blocks of 8 pixels by the warp's 16 filters. A lane holds them transposed: two pixels of one
// filter, and of the filter 8 further. `address` is the lane's position in the staging tile.

// 16-bit: a matrix has 8 pixels as rows and 8 filters as columns.
template <int COUNT, class Half, class Filters>
__device__ __forceinline__ void finish_matrices(const float* acc, u32 address, const Filters& biases) {
    u32 pairs[2 * COUNT];
    if (HAS_AUX) load_matrices_transposed(pairs, address);
#pragma unroll
    for (int i = 0; i < 2 * COUNT; ++i) {
        float2 values = biases.add(acc[2 * i], acc[2 * i + 1], i % 2);
        values = finish_pair(values, HAS_AUX ? unpack_pair<Half>(pairs[i]) : make_float2(0.f, 0.f));
        pairs[i] = pack_pair<Half>(values.x, values.y);
    }
    store_matrices_transposed(address, pairs);
}

// 32-bit, element by element: 4 pixels of the same parity by 8 filters, which the swizzle spreads over all banks. The
// next pixel is one row and one chunk away, the filter 8 further two chunks.
template <int COUNT, class Filters>
__device__ __forceinline__ void finish_words(const float* acc, u32 address, const Filters& biases) {
    float2 aux_values[2 * COUNT] = {};
#pragma unroll
    for (int i = 0; i < 2 * COUNT; ++i) {
        const u32 first = (address ^ i % 2 * 32) + i / 2 * 8 * ROW_BYTES;
        if (HAS_AUX) aux_values[i] = {load_shared(first), load_shared(first ^ (ROW_BYTES + 16))};
    }
#pragma unroll
    for (int i = 0; i < 2 * COUNT; ++i) {
        const u32 first = (address ^ i % 2 * 32) + i / 2 * 8 * ROW_BYTES;
        const float2 values = finish_pair(biases.add(acc[2 * i], acc[2 * i + 1], i % 2), aux_values[i]);
        store_shared(first, values.x);
        store_shared(first ^ (ROW_BYTES + 16), values.y);
    }
}

// 8-bit: a matrix of pairs of filters has 8 pixels as rows and 8 pairs as columns.
template <int COUNT, class Filters>
__device__ __forceinline__ void finish_bytes(const int* acc, u32 address, const Filters& filters) {
    u32 words[COUNT] = {};
    if (HAS_AUX) load_matrices_transposed(words, address);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float sums[4] = {float(acc[4 * i]), float(acc[4 * i + 1]), float(acc[4 * i + 2]), float(acc[4 * i + 3])};
        words[i] = filters.finished(sums, words[i]);
    }
    store_matrices_transposed(address, words);
}

template <int COUNT>
__device__ __forceinline__ void finish_blocks(const Sum* acc, u32 address, const Biases& biases) {
    if constexpr (sizeof(Element) == 1) finish_bytes<COUNT>(acc, address, biases);
    else if constexpr (sizeof(Element) == 2) finish_matrices<COUNT, Element>(acc, address, biases);
    else finish_words<COUNT>(acc, address, biases);
}

// A warpgroup's staging tile: the residuals of a tile, if any, then its results. `residual_full` signals that the
// residuals have arrived, and that a tile shared by both warpgroups belongs to this one.
struct StagingTile {
    const TensorMap &residual_map, &output_map;
    const WindowShape& shape;
    const u32 address, residual_full;
    const int consumer;
    const bool copier = threadIdx.x % 128 == 0;  // issues this warpgroup's TMA copies
    u32 parity = 0;

    __device__ __forceinline__ StagingTile(const TensorMap& residual_map, const TensorMap& output_map,
                                           const WindowShape& shape, u32 staging_tiles, u32 barriers, int consumer)
        : residual_map(residual_map), output_map(output_map), shape(shape),
          address(staging_tiles + (SHARED_STAGING ? 0 : consumer * STAGING_BYTES)),
          residual_full(barriers + consumer * 8), consumer(consumer) {}

    __device__ __forceinline__ static void init(u32 barriers) {
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) barrier_init(barriers + consumer * 8, 1);
    }

    // TMA boxes of a tile with a row inside the image.
    __device__ __forceinline__ int boxes(const Tile& tile) const {
        return HALVES * (ONE_BOX ? 1 : min(TILE_ROWS, shape.output_height - tile.row));
    }
    __device__ __forceinline__ u32 box(int i) const {
        return address + i / HALVES * WINDOW_WIDTH * STAGED_ROW + i % HALVES * HALF_BYTES;
    }

    // Call before the mainloop: residuals arrive during it. With `other`, prefetches for the other warpgroup, whose
    // turn with a shared staging tile is next.
    __device__ __forceinline__ void begin(const Tile& tile, bool other = false) const {
        const u32 ready = other ? residual_full + (1 - 2 * consumer) * 8 : residual_full;
        if (!copier) return;
        tma_store_wait_read<0>();  // the staging tile is free again
        if (!HAS_AUX) {
            if (SHARED_STAGING) barrier_arrive(ready);
            return;
        }
        const int count = boxes(tile);
        barrier_expect(ready, count * BOX_BYTES);
        for (int i = 0; i < count; ++i)
            tma_load_4d(box(i), residual_map, ready, tile.filter + i % HALVES * K_TILE, tile.column,
                        tile.row + i / HALVES, tile.image);
    }

    __device__ __forceinline__ void wait() {
        if (HAS_AUX || SHARED_STAGING) {
            barrier_wait(residual_full, parity);
            parity ^= 1;
        } else {
            warpgroup_sync(consumer);  // until the copier has seen that the staging tile is free
        }
    }

    // A lane's position in the first blocks: the start of its matrix row, or its first word.
    __device__ __forceinline__ u32 row() const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        if constexpr (sizeof(Element) == 1) {  // 64-byte swizzle: chunks of 16 bytes by pairs of pixels
            return address + lane * STAGED_ROW + (warp ^ lane % 8 / 2) * 16;
        } else if constexpr (sizeof(Element) == 4) {
            const int pixel = lane % 4 * 2, chunk = warp % 2 * 4 + lane / 16;
            return address + warp / 2 * HALF_BYTES + pixel * ROW_BYTES + (chunk ^ pixel) * 16 + lane / 4 % 4 * 4;
        } else {
            return address + (lane / 16 * 8 + lane % 8) * ROW_BYTES + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
        }
    }

    __device__ __forceinline__ void store(const Accumulators& acc, const Tile& tile, const Biases& biases) {
        wait();
        const u32 first = row();
        constexpr int AT_ONCE = sizeof(Element) == 1 ? 4 : 2;
#pragma unroll
        for (int block = 0; block + AT_ONCE - 1 < BLOCKS; block += AT_ONCE)
            finish_blocks<AT_ONCE>(acc + 4 * block, first + block * 8 * STAGED_ROW, biases);
        if constexpr (BLOCKS % AT_ONCE)
            finish_blocks<BLOCKS % AT_ONCE>(acc + 4 * (BLOCKS - BLOCKS % AT_ONCE),
                                            first + (BLOCKS - BLOCKS % AT_ONCE) * 8 * STAGED_ROW, biases);
        fence_async_proxy();
        warpgroup_sync(consumer);
        if (!copier) return;
        const int count = boxes(tile);
        for (int i = 0; i < count; ++i)
            tma_store_4d(output_map, box(i), tile.filter + i % HALVES * K_TILE, tile.column, tile.row + i / HALVES,
                         tile.image);
    }

    __device__ __forceinline__ void close() const {
        if (copier) tma_store_wait_read<0>();
    }
};
