// The epilogue of a persistent block straight from registers to y; sums that come in parts are added up first.
#pragma once

#include "common/warp.cuh"
#include "conv2d/sm90_persistent_tile.cuh"
#include "conv2d/placement.cuh"

// A lane has two neighbouring filters of rows lane / 4 and lane / 4 + 8 of its warp's 16, in every 8 filters; the four
// lanes of a row write 8 elements together.
struct Writer {
    const Finish& finish;
    Output* y;
    const ConvShape& shape;
    const Placement& placement;
    int pixels;
    int y_pitch;  // elements from pixel to pixel where PITCHED: y is a part of a larger buffer

    // The pixel by which `offset` finds it: of several classes that of the whole image, which half as many registers
    // hold as its offset. All of them have as many pixels here as the largest, and what others lack is negative.
    __device__ __forceinline__ int stored(int pixel) const {
        if constexpr (CLASSES == 1) return pixel;
        const Place at = place(pixel, shape, placement);
        if (pixel >= pixels || at.h >= placement.height || at.w >= placement.width) return -1;
        return (at.n * placement.height + at.h) * placement.width + at.w;
    }
    __device__ __forceinline__ bool exists(int pixel, long long stored) const {  // or its offset
        return CLASSES > 1 ? stored >= 0 : pixel < pixels;
    }
    __device__ __forceinline__ long long offset(int pixel) const {
        if constexpr (CLASSES > 1) return 1LL * pixel * shape.filters;
        return PITCHED ? 1LL * pixel * y_pitch : ::offset(pixel, shape, placement);
    }

    __device__ __forceinline__ void store(const Sums& sums, int warp_pixel, int first_filter) const {
        if constexpr (sizeof(Output) == 1 && FILTERS_ALIGNED && COLUMNS % 32 == 0) {
            store_bytes(sums, warp_pixel, first_filter);
            return;
        }
        const int lane = threadIdx.x % 32;
        long long at[ATOMS][2];
#pragma unroll
        for (int i = 0; i < ATOMS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                at[i][half] = offset(stored(warp_pixel + i * 64 + half * 8 + lane / 4));
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            const int filter = first_filter + j * 8 + lane % 4 * 2;
            const FilterPair pair = finish.of(filter);
#pragma unroll
            for (int i = 0; i < ATOMS; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (exists(warp_pixel + i * 64 + half * 8 + lane / 4, at[i][half]))
                        finish.store_pair(sums[i][j * 4 + half * 2], sums[i][j * 4 + half * 2 + 1], pair, filter,
                                          at[i][half], y);
        }
    }

    // Results of one byte: four lanes exchange what they have of 32 filters, so that each has 8 neighbours to store.
    __device__ __forceinline__ void store_bytes(const Sums& sums, int warp_pixel, int first_filter) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j += 4) {
            FilterPair pairs[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) pairs[b] = finish.of(first_filter + (j + b) * 8 + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < ATOMS; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int pixel = warp_pixel + i * 64 + half * 8 + lane / 4;
                    const long long at = offset(pixel) + first_filter + j * 8;
                    u32 codes[4] = {};
#pragma unroll
                    for (int b = 0; b < 4; ++b) {
                        if (pixel >= pixels) continue;
                        const float* two = &sums[i][(j + b) * 4 + half * 2];
                        const float2 results = finish.both(two[0], two[1], pairs[b], at + b * 8 + lane % 4 * 2);
                        codes[b] = to_e4m3x2(results.x, results.y);
                    }
                    const uint2 eight = exchanged(codes);
                    if (pixel < pixels) *reinterpret_cast<uint2*>(y + at + lane % 4 * 8) = eight;
                }
        }
    }

    // Four lanes each have a 16-bit part of four rows, and get row lane % 4, its parts in the order of the lanes.
    __device__ __forceinline__ static uint2 exchanged(const u32 (&parts)[4]) {
        const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
        const u32 low = parts[0] | parts[1] << 16, high = parts[2] | parts[3] << 16;
        const u32 kept = upper ? high : low, got = __shfl_xor_sync(ALL_LANES, upper ? low : high, 2);
        const u32 near = upper ? got : kept, far = upper ? kept : got;  // of lanes 0 or 1, and of 2 or 3
        const u32 firsts = (near & 0xFFFF) | far << 16, seconds = near >> 16 | (far & 0xFFFF0000);
        const u32 other = __shfl_xor_sync(ALL_LANES, odd ? firsts : seconds, 1);
        const u32 even_lanes = odd ? other : firsts, odd_lanes = odd ? seconds : other;
        return make_uint2((even_lanes & 0xFFFF) | odd_lanes << 16, even_lanes >> 16 | (odd_lanes & 0xFFFF0000));
    }

    // Each warpgroup has its part of the sums, and stores the pieces that are its own.
    __device__ __forceinline__ void store_shared_sum(const Sums& sums, const Parts& parts, int warp_pixel,
                                                     int first_filter) const {
        constexpr int BLOCKS = COLUMNS / 8;
        const int lane = threadIdx.x % 32, consumer = threadIdx.x / 128 - 1, sharer = DEPTH ? consumer : 0;
        const auto filter_of = [&](int piece) { return first_filter + piece % BLOCKS * 8 + lane % 4 * 2; };
        if (!PARTS_APART) {
            if (SPLITS > 1) cluster_sync();
            else consumers_sync();
        }
        parts.push(sums[0], DEPTH ? 2 * parts.rank + consumer : parts.rank);
        if (SPLITS == 1) consumers_sync();
        const int count = parts.count(sharer);
        for (int start = 0; start < count; start += Parts::AT_ONCE) {
            FilterPair pairs[Parts::AT_ONCE];  // come while the parts do
#pragma unroll
            for (int i = 0; i < Parts::AT_ONCE; ++i)
                if (start + i < count) pairs[i] = finish.of(filter_of(parts.piece(sharer, start + i)));
            parts.wait(sharer);
            float totals[Parts::AT_ONCE][4];
            parts.add_up(totals, sharer, start);
#pragma unroll
            for (int i = 0; i < Parts::AT_ONCE; ++i) {
                if (start + i >= count) break;
                const int piece = parts.piece(sharer, start + i), filter = filter_of(piece);
                const int pixel = warp_pixel + piece / BLOCKS * 64 + lane / 4;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int at = stored(pixel + half * 8);
                    if (exists(pixel + half * 8, at))
                        finish.store_pair(totals[i][2 * half], totals[i][2 * half + 1], pairs[i], filter, offset(at),
                                          y);
                }
            }
        }
    }
};
