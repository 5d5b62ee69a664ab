// M[point][tile][filter] = sum over channels of V[point][tile][channel] * U[point][channel][filter], as a function of a
// CTA index: one BLOCK_TILES x BLOCK_FILTERS block of the product of one point.
//
// SPLIT selects the arithmetic:
//  - 0: fp32 on CUDA cores, an 8x8 outer product per thread and channel, both operands channel by channel in smem (V is
//  transposed on the way by 4-byte copies). 64 multiply-adds per four 16-byte reads.
//  - 1: three TF32 MMAs: a = high + low, b = high + low; high*high + high*low + low*high omits only what is below
//  fp32's last bit or two. U is [point][filter][channel], and both operands stay as they are: rows of BLOCK_CHANNELS
//  channels. The order of channels in a sum is free, so a lane reads four adjacent ones and feeds two instructions with
//  them. 16 floats per row put two rows over all 32 banks, which is what one 8-lane phase of a 16-byte read covers: no
//  conflicts, no padding.
// Copies run STAGES - 1 slices of channels ahead of the arithmetic.
#pragma once

#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int BLOCK_TILES = 128;   // config.block_tiles: tiles per CTA
constexpr int BLOCK_FILTERS = 64;  // config.block_filters: filters per CTA
constexpr int STAGES = 4;          // config.stages: stages of 16 channels
constexpr bool SPLIT = false;      // config.split: three TF32 products instead of one fp32 product
constexpr int GEMM_THREADS = 128;  // config.gemm_threads
#endif

constexpr int BLOCK_CHANNELS = 16;
constexpr int SLICE_PITCH = BLOCK_TILES + 4;  // transposing stores of 8 adjacent channels hit 8 different banks
constexpr int TILE_SLICE = SPLIT ? BLOCK_TILES * BLOCK_CHANNELS : BLOCK_CHANNELS * SLICE_PITCH;
constexpr int FILTER_SLICE = BLOCK_CHANNELS * BLOCK_FILTERS;
constexpr int GEMM_SLICE = TILE_SLICE + FILTER_SLICE;  // floats of smem per stage

struct GemmShape {  // filled by escalade/ops/conv2d/rungs/winograd.py, in this order
    int channels, filters;           // rounded up to 4
    int tile_blocks, filter_blocks;  // V and M have room for whole blocks of tiles
};

struct GemmBlock {
    const float* inputs;   // V of this point
    const float* weights;  // U of this point
    float* products;       // M of this point
    int first_tile, first_filter;
};

__device__ __forceinline__ GemmBlock gemm_block(int block, const float* inputs, const float* weights, float* products,
                                                const GemmShape& shape) {
    // Filter blocks of the same tiles are consecutive, so V is read from DRAM once.
    const int filter_block = block % shape.filter_blocks;
    const int tile_block = block / shape.filter_blocks % shape.tile_blocks;
    const long long point = block / (shape.filter_blocks * shape.tile_blocks), tiles = shape.tile_blocks * BLOCK_TILES;
    return {inputs + point * tiles * shape.channels, weights + point * shape.channels * shape.filters,
            products + point * tiles * shape.filters, tile_block * BLOCK_TILES, filter_block * BLOCK_FILTERS};
}

// The copiers below keep one address per thread, advanced slice by slice: one per copy would exceed the registers.

// Copies ROWS rows of BLOCK_CHANNELS channels to smem unchanged.
template <int ROWS>
struct RowCopier {
    static constexpr int CHUNKS = BLOCK_CHANNELS / 4, ROWS_PER_PASS = GEMM_THREADS / CHUNKS;
    static_assert(ROWS % ROWS_PER_PASS == 0, "every thread copies the same number of chunks");
    const float* from;
    int row_step, rows_left, channels_left;  // "left" counts from this thread's first chunk

    __device__ __forceinline__ RowCopier(const float* matrix, int first_row, int rows, int channels) {
        const int row = first_row + threadIdx.x / CHUNKS, channel = threadIdx.x % CHUNKS * 4;
        from = matrix + 1LL * row * channels + channel;
        row_step = ROWS_PER_PASS * channels, rows_left = rows - row, channels_left = channels - channel;
    }

    __device__ __forceinline__ void copy(float* slice) {
        const u32 to = shared_address(slice + threadIdx.x * 4);
#pragma unroll
        for (int pass = 0; pass < ROWS / ROWS_PER_PASS; ++pass)
            copy_async_16(to + pass * GEMM_THREADS * 16, from + pass * row_step,
                          pass * ROWS_PER_PASS < rows_left && channels_left > 0);
        from += BLOCK_CHANNELS, channels_left -= BLOCK_CHANNELS;
    }
};

// Copies BLOCK_TILES rows of BLOCK_CHANNELS channels to smem, transposed.
struct TransposingCopier {
    static constexpr int ROWS_PER_PASS = GEMM_THREADS / BLOCK_CHANNELS;
    static_assert(BLOCK_TILES % ROWS_PER_PASS == 0, "every thread copies the same number of values");
    const float* from;
    int row_step, channels_left, position;

    __device__ __forceinline__ TransposingCopier(const GemmBlock& block, const GemmShape& shape) {
        const int row = threadIdx.x / BLOCK_CHANNELS, channel = threadIdx.x % BLOCK_CHANNELS;
        from = block.inputs + 1LL * (block.first_tile + row) * shape.channels + channel;
        row_step = ROWS_PER_PASS * shape.channels, channels_left = shape.channels - channel;
        position = channel * SLICE_PITCH + row;
    }

    __device__ __forceinline__ void copy(float* slice) {
        const u32 to = shared_address(slice + position);
#pragma unroll
        for (int pass = 0; pass < BLOCK_TILES / ROWS_PER_PASS; ++pass)
            copy_async_4(to + pass * ROWS_PER_PASS * 4, from + pass * row_step, channels_left > 0);
        from += BLOCK_CHANNELS, channels_left -= BLOCK_CHANNELS;
    }
};

// Copies BLOCK_CHANNELS rows of BLOCK_FILTERS filters to smem unchanged.
struct FilterCopier {
    static constexpr int CHUNKS = BLOCK_FILTERS / 4, ROWS_PER_PASS = GEMM_THREADS / CHUNKS;
    static_assert(BLOCK_CHANNELS % ROWS_PER_PASS == 0, "every thread copies the same number of chunks");
    const float* from;
    int filters, channels_left;

    __device__ __forceinline__ FilterCopier(const GemmBlock& block, const GemmShape& shape) {
        const int channel = threadIdx.x / CHUNKS, filter = block.first_filter + threadIdx.x % CHUNKS * 4;
        from = block.weights + 1LL * channel * shape.filters + filter;
        filters = shape.filters, channels_left = filter < shape.filters ? shape.channels - channel : 0;
    }

    __device__ __forceinline__ void copy(float* slice) {
        const u32 to = shared_address(slice + threadIdx.x * 4);
#pragma unroll
        for (int pass = 0; pass < BLOCK_CHANNELS / ROWS_PER_PASS; ++pass)
            copy_async_16(to + pass * GEMM_THREADS * 16, from + pass * ROWS_PER_PASS * filters,
                          pass * ROWS_PER_PASS < channels_left);
        from += BLOCK_CHANNELS * filters, channels_left -= BLOCK_CHANNELS;
    }
};

// fp32: 8 x 8 accumulators per thread, as four quarters of 4 x 4. A warp is 4 x 8 threads.
struct OuterProduct {
    struct Copier {
        TransposingCopier tiles;
        FilterCopier filters;
        __device__ __forceinline__ Copier(const GemmBlock& block, const GemmShape& shape)
            : tiles(block, shape), filters(block, shape) {}
    };
    float acc[8][8] = {};
    int tile, filter;  // of the first quarter; the others are half a block away

    __device__ __forceinline__ OuterProduct() {
        constexpr int WARPS_ACROSS = BLOCK_FILTERS / 64;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        tile = warp / WARPS_ACROSS * 16 + lane / 8 * 4;
        filter = warp % WARPS_ACROSS * 32 + lane % 8 * 4;
    }

    __device__ __forceinline__ void multiply(const float* slice) {
        const float *inputs = slice + tile, *weights = slice + TILE_SLICE + filter;
#pragma unroll
        for (int channel = 0; channel < BLOCK_CHANNELS; ++channel, inputs += SLICE_PITCH, weights += BLOCK_FILTERS) {
            const Pack<float, 4> a[2] = {load_pack<float, 4>(inputs), load_pack<float, 4>(inputs + BLOCK_TILES / 2)};
            const Pack<float, 4> b[2] = {load_pack<float, 4>(weights),
                                         load_pack<float, 4>(weights + BLOCK_FILTERS / 2)};
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) acc[i][j] += a[i / 4].at[i % 4] * b[j / 4].at[j % 4];
        }
    }

    __device__ __forceinline__ void store(const GemmBlock& block, const GemmShape& shape) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = block.first_tile + tile + i / 4 * (BLOCK_TILES / 2) + i % 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = block.first_filter + filter + half * (BLOCK_FILTERS / 2);
                if (column >= shape.filters) continue;
                const float* s = &acc[i][half * 4];
                store_pack(block.products + 1LL * row * shape.filters + column,
                           Pack<float, 4>{{s[0], s[1], s[2], s[3]}});
            }
        }
    }
};

// Three TF32 MMAs: a warp has 64 tiles x 32 filters, as 4 x 4 instructions of 16 x 8.
struct SplitProduct {
    struct Copier {
        RowCopier<BLOCK_TILES> tiles;
        RowCopier<BLOCK_FILTERS> filters;
        __device__ __forceinline__ Copier(const GemmBlock& block, const GemmShape& shape)
            : tiles(block.inputs, block.first_tile, shape.tile_blocks * BLOCK_TILES, shape.channels),
              filters(block.weights, block.first_filter, shape.filters, shape.channels) {}
    };
    float acc[4][4][4] = {};
    int first_tile, first_filter;  // of the warp
    int group, position;           // of the lane: groupID and threadID_in_group in PTX

    __device__ __forceinline__ SplitProduct() {
        constexpr int WARPS_ACROSS = BLOCK_FILTERS / 32;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        first_tile = warp / WARPS_ACROSS * 64, first_filter = warp % WARPS_ACROSS * 32;
        group = lane / 4, position = lane % 4;
    }

    // TF32 is fp32 without the last 13 bits. The high part is rounded to nearest; the low part is exact, and the
    // instruction ignores its last bits. (A conversion that handles overflow takes three times the instructions; an Inf
    // makes the low part NaN here, as Winograd's transforms do anyway.)
    static __device__ __forceinline__ void split(float value, u32& high, u32& low) {
        high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
        low = __float_as_uint(value - __uint_as_float(high));
    }

    __device__ __forceinline__ void multiply(const float* slice) {
        const float* inputs = slice + (first_tile + group) * BLOCK_CHANNELS + position * 4;
        const float* weights = slice + TILE_SLICE + (first_filter + group) * BLOCK_CHANNELS + position * 4;
        Pack<float, 4> b[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) b[n] = load_pack<float, 4>(weights + n * 8 * BLOCK_CHANNELS);
        u32 b_high[4][2][2], b_low[4][2][2];  // [n][step][register]
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int v = 0; v < 4; ++v) split(b[n].at[v], b_high[n][v / 2][v % 2], b_low[n][v / 2][v % 2]);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const Pack<float, 4> upper = load_pack<float, 4>(inputs + m * 16 * BLOCK_CHANNELS);
            const Pack<float, 4> lower = load_pack<float, 4>(inputs + (m * 16 + 8) * BLOCK_CHANNELS);
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                u32 a_high[4], a_low[4];
#pragma unroll
                for (int v = 0; v < 2; ++v) {
                    split(upper.at[step * 2 + v], a_high[v * 2], a_low[v * 2]);
                    split(lower.at[step * 2 + v], a_high[v * 2 + 1], a_low[v * 2 + 1]);
                }
                // Small products first: against a large sum they would be rounded away.
#pragma unroll
                for (int n = 0; n < 4; ++n) mma_m16n8k8_tf32(acc[m][n], a_low, b_high[n][step]);
#pragma unroll
                for (int n = 0; n < 4; ++n) mma_m16n8k8_tf32(acc[m][n], a_high, b_low[n][step]);
#pragma unroll
                for (int n = 0; n < 4; ++n) mma_m16n8k8_tf32(acc[m][n], a_high, b_high[n][step]);
            }
        }
    }

    __device__ __forceinline__ void store(const GemmBlock& block, const GemmShape& shape) const {
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = block.first_tile + first_tile + m * 16 + half * 8 + group;
    #pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int column = block.first_filter + first_filter + n * 8 + position * 2;
                    if (column >= shape.filters) continue;
                    store_pack(block.products + 1LL * row * shape.filters + column,
                               Pack<float, 2>{{acc[m][n][half * 2], acc[m][n][half * 2 + 1]}});
                }
            }
    }
};

template <class Product>
__device__ __forceinline__ void gemm(float* shared, const GemmBlock& block, const GemmShape& shape) {
    Product product;
    typename Product::Copier copier(block, shape);
    const auto copy_slice = [&](float* slice) {
        copier.tiles.copy(slice);
        copier.filters.copy(slice + TILE_SLICE);
        copy_async_commit();  // past the last channel too, so that the number of groups in flight is constant
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) copy_slice(shared + stage * GEMM_SLICE);

    float *filled = shared, *free = shared + (STAGES - 1) * GEMM_SLICE;
    for (int channel = 0; channel < shape.channels; channel += BLOCK_CHANNELS) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();  // this slice has arrived for all, and all are done with the previous one
        product.multiply(filled);
        copy_slice(free);  // after the arithmetic, where its addresses do not compete for registers
        free = filled;
        filled = filled == shared + (STAGES - 1) * GEMM_SLICE ? shared : filled + GEMM_SLICE;
    }
    copy_async_wait<0>();
    product.store(block, shape);
}

template <bool>
struct ProductOf { using type = OuterProduct; };
template <>
struct ProductOf<true> { using type = SplitProduct; };

// The whole stage for one CTA.
__device__ __forceinline__ void gemm_stage(int block, float* shared, const float* inputs, const float* weights,
                                           float* products, const GemmShape& shape) {
    gemm<ProductOf<SPLIT>::type>(shared, gemm_block(block, inputs, weights, products, shape), shape);
}
