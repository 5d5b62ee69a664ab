// y = pool(relu(sum over r, s, c of x[n][row + r - pad][column + s - pad][c] * weight[k][c][r][s] + bias[k]))
//
// A tensor-core product for any small number of channels: its rows are pairs of adjacent output pixels, its columns the
// filters of both, and k the pixels of a filter row that a pair reads (tensor_core.cuh): with 7 taps, 7 of 8 products
// are useful. Persistent CTAs take IMAGES images at a time, staged in smem while the previous ones are computed. A warp
// keeps its weights in registers and takes 16 pairs of columns by ROWS output rows, anywhere in the tile: a fragment of
// an image row is loaded once and serves all output rows that read it. With four channels a pair starts every 16 bytes,
// so ldmatrix reads overlapping windows; with one channel every 4 bytes, one word per lane.
//
// Pooling is in registers: a lane has all pixels of a window, because the pairs of a 4-wide window are rows `group` and
// `group` + 8 of the product. If the last windows of a row are partial and have only one pair (NARROW), those of two
// blocks of rows share the two rows, so no missing pair is computed.
//
// SPLIT: fp32 by fp16 halves, three MMAs per product (halves.cuh), x with one power of two per tile. Tensor cores round
// toward zero, so the sums of each image row (with one channel, of four) are promoted to fp32 accumulators.
//
// Weights are zero where a pair's pixel is outside one of its two windows, and zero times infinity is NaN: a tile with
// a non-finite pixel (SPLIT: or weight) is computed without tensor cores.
// Limiter: with one channel memory, with four the mma.sync rate.
//
// The prelude defines, besides the names in tensor_core.cuh: Source, Element, Operand (16 bits), HEIGHT, WIDTH, PAD_H,
// PAD_W, OUTPUT_HEIGHT, OUTPUT_WIDTH, NHWC, HAS_BIAS, HAS_RELU, POOL (1, 2 or 4), IMAGES, ROWS, WARPS, BLOCKS_PER_SM,
// ROW_BLOCKS (of ROWS, per image), CELLS_IN_ROW (pairs, or windows of two), NARROW, STAGED_WIDTH (pixels as copied),
// OPERAND_WIDTH (pixels as multiplied, padded if that puts pairs into different banks), SOURCE_BUFFER (elements of a
// tile as stored, 0 if it is multiplied as stored), BUFFER (of its operands, including reads past their end),
// COPY_BYTES (per cp.async; 0: element by element, for images staged in another order).
//
// Rung             switches
//   images_a_tile  POOL 1, without HAS_RELU: both are left to pool.cu
//   pooled         POOL and HAS_RELU as requested
//   split_halves   SPLIT, and POOL and HAS_RELU as requested
// Read tensor_core_tile.cuh (tile), tensor_core_staging.cuh (loads), tensor_core_products.cuh (mainloop),
// tensor_core_results.cuh (epilogue), then tensor_core_plain.cuh (non-finite tiles).

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Operand = __half;           // columns.operand
constexpr bool NHWC = false;      // problem.layout == "nhwc"
constexpr bool HAS_BIAS = false;  // problem.bias
constexpr bool HAS_RELU = false;  // problem.relu
constexpr int BLOCKS_PER_SM = 6;  // config.blocks_per_sm
constexpr int COPY_BYTES = 8;     // product.copy_bytes: 0 if images must be repacked
#endif

#include "few_channels/tensor_core_plain.cuh"
#include "few_channels/tensor_core_products.cuh"
#include "few_channels/tensor_core_results.cuh"
#include "few_channels/tensor_core_staging.cuh"
#include "few_channels/tensor_core_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    few_channels_tensor_core(const Source* __restrict__ x, const Element* __restrict__ weight,
                             const Element* __restrict__ bias, Element* __restrict__ y,
                             const u32* __restrict__ packed, const int* __restrict__ exponents, int batch) {
    // Two tiles of operands; or one tile as stored, and its operands (upper and lower halves).
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Operand* operands = reinterpret_cast<Operand*>(shared_memory + SOURCE_BUFFER * sizeof(Source));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, unit = warp % UNITS;
    wait_for_previous_launch();

    Weights weights;
#pragma unroll
    for (int i = 0; i < PACKED; ++i) {
        const Pack<u32, 4> four = load_pack<u32, 4>(packed + ((unit * PACKED + i) * 32 + lane) * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) weights[2 * i + e / 2][e % 2] = four.at[e];
    }
    Epilogue epilogue(bias, first_filter(unit, lane % 4));

    // Reads past the end of a row or tile are multiplied by zeros or discarded: the values must only be finite.
#pragma unroll 1
    for (int at = threadIdx.x; at < (DIRECT || SPLIT ? 2 : 1) * BUFFER; at += THREADS) operands[at] = Operand(0.f);
#pragma unroll 1
    for (int at = STAGED + threadIdx.x; at < SOURCE_BUFFER; at += THREADS)
        reinterpret_cast<Source*>(shared_memory)[at] = Source(0.f);
    if (DIRECT) __syncthreads();  // the first tile overwrites the zeros

    const u32 tiles = (batch + IMAGES - 1u) / IMAGES;
    const auto fetch_tile = [&](u32 tile, int buffer) {
        if (tile < tiles)
            fetch(reinterpret_cast<Source*>(shared_memory) + (DIRECT ? buffer * BUFFER : 0), x, 1LL * tile * IMAGES,
                  min(IMAGES, static_cast<int>(batch - tile * IMAGES)));
    };
    fetch_tile(blockIdx.x, 0);
    int turn = 0;
#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn ^= 1) {
        copy_async_wait<0>();
        __syncthreads();  // this tile has arrived, and the previous one is no longer read
        bool non_finite;
        int exponent = 0;
        const Operand* staged = operands;
        if constexpr (DIRECT) {
            fetch_tile(tile + gridDim.x, 1 - turn);
            staged += turn * BUFFER;
            non_finite = inspect(staged);
        } else if constexpr (SPLIT) {
            exponent = convert_split(operands, reinterpret_cast<const Source*>(shared_memory));
            non_finite = exponent == NOT_FINITE || !in_range(exponent, exponents);
        } else {
            non_finite = convert(operands, reinterpret_cast<const Source*>(shared_memory));
        }
        const bool fallback = __syncthreads_or(non_finite);
        if (!DIRECT) fetch_tile(tile + gridDim.x, 0);

        const long long first = 1LL * tile * IMAGES;
        const int images = IMAGES == 1 ? 1 : min(IMAGES, static_cast<int>(batch - tile * IMAGES));
        Element* target = y + first * OUTPUT_IMAGE;
        if (fallback) {
            convolve_fallback(x + first * IMAGE, weight, bias, target, images);
            continue;
        }
        if (SPLIT) epilogue.move_to(exponent, exponents, first_filter(unit, lane % 4));
        const int blocks = (images * CELLS_IN_IMAGE + CELLS_IN_TILE - 1) / CELLS_IN_TILE;
#pragma unroll 1
        for (int m = warp / UNITS; m < blocks; m += WORKERS) {
            Writer writer(epilogue, target, images, m, unit);
            convolve(staged, weights, m, batch >> 31, [&](int r, const Accumulators& acc) { writer.add(r, acc); });
        }
    }
}
