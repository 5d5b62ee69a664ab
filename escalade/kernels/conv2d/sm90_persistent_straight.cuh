// Epilogue of a persistent CTA directly from registers to y; split-K parts are reduced first.
#pragma once

#include "common/warp.cuh"
#include "conv2d/sm90_persistent_tile.cuh"
#include "conv2d/placement.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool PITCHED = false;  // y_pitch > 0
#endif

// 1-byte results are stored, and residuals loaded, 8 at a time.
enum { BY_EIGHT = sizeof(Output) == 1 && FILTERS_ALIGNED && COLUMNS % 32 == 0 && PARTS == 1 };
struct Residuals {
    uint2 of[BY_EIGHT ? COLUMNS / 32 : 1][ATOMS][2];
};

enum : u32 { LOW_HALVES = 0x5410, HIGH_HALVES = 0x7632 };  // of two words, for __byte_perm

// In every 8 filters a lane holds two adjacent ones, of rows lane / 4 and lane / 4 + 8 of its warp's 16. The four lanes
// of a row store 8 consecutive elements.
struct Writer {
    const Finish& finish;
    Output* y;
    const ConvShape& shape;
    const Placement& placement;
    int pixels;
    int y_pitch;  // elements between pixels where PITCHED: y is part of a larger buffer

    // Pixel index for `offset`. With several phases it is the index in the whole image: half the registers of an
    // offset. Every phase is padded to the largest one's pixel count; pixels it does not have return -1.
    __device__ __forceinline__ int stored(int pixel) const {
        if constexpr (CLASSES == 1) return pixel;
        const ImagePosition at = position_in_image(pixel, shape, placement);
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

    // Call before the mainloop, which hides the latency. Other results load their residuals when they are stored.
    __device__ __forceinline__ void load(Residuals& residuals, int warp_pixel, int first_filter) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < ATOMS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int pixel = warp_pixel + i * 64 + half * 8 + lane / 4;
                const Element* from = finish.residual + offset(pixel) + first_filter + lane % 4 * 8;
#pragma unroll
                for (int j = 0; j < COLUMNS / 32; ++j)
                    residuals.of[j][i][half] =
                        pixel < pixels ? *reinterpret_cast<const uint2*>(from + j * 32) : make_uint2(0, 0);
            }
    }

    __device__ __forceinline__ void store(const Accumulators& acc, const Residuals& residuals, int warp_pixel,
                                          int first_filter) const {
        if constexpr (BY_EIGHT) {
            store_bytes<Output>(acc, residuals, warp_pixel, first_filter);
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
                        finish.store_pair(acc[i][j * 4 + half * 2], acc[i][j * 4 + half * 2 + 1], pair, filter,
                                          at[i][half], y);
        }
    }

    // 1-byte results: four lanes exchange 32 filters, so that each loads and stores 8 consecutive ones. A template
    // because wider results have no pairs of bytes.
    template <class Byte>
    __device__ __forceinline__ void store_bytes(const Accumulators& acc, const Residuals& residuals, int warp_pixel,
                                                int first_filter) const {
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
                    uint2 added = make_uint2(0, 0);
                    if (HAS_RESIDUAL) {
                        const uint2 eight = residuals.of[j / 4][i][half];
                        added = exchanged({eight.x, eight.x >> 16, eight.y, eight.y >> 16});
                    }
                    u32 codes[4];
#pragma unroll
                    for (int b = 0; b < 4; ++b) {
                        const Sum* two = &acc[i][(j + b) * 4 + half * 2];
                        const u32 other = (b < 2 ? added.x : added.y) >> b % 2 * 16;
                        const float2 aux = HAS_RESIDUAL ? unpack_bytes<Byte>(other) : make_float2(0.f, 0.f);
                        const float2 results = finish.values(make_float2(two[0], two[1]), pairs[b], aux);
                        codes[b] = pack_bytes<Byte>(results.x, results.y);
                    }
                    const uint2 eight = exchanged(codes);
                    if (pixel < pixels)
                        *reinterpret_cast<uint2*>(y + offset(pixel) + first_filter + j * 8 + lane % 4 * 8) = eight;
                }
        }
    }

    // 4x4 transpose across four lanes: each holds one 16-bit part of four rows (in low halves) and receives row
    // lane % 4, its parts in lane order. It is its own inverse.
    __device__ __forceinline__ static uint2 exchanged(const u32 (&parts)[4]) {
        const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
        const u32 low = __byte_perm(parts[0], parts[1], LOW_HALVES), high = __byte_perm(parts[2], parts[3], LOW_HALVES);
        const u32 kept = upper ? high : low, got = __shfl_xor_sync(ALL_LANES, upper ? low : high, 2);
        const u32 near = upper ? got : kept, far = upper ? kept : got;  // from lanes 0 or 1; from lanes 2 or 3
        const u32 firsts = __byte_perm(near, far, LOW_HALVES), seconds = __byte_perm(near, far, HIGH_HALVES);
        const u32 other = __shfl_xor_sync(ALL_LANES, odd ? firsts : seconds, 1);
        const u32 even_lanes = odd ? other : firsts, odd_lanes = odd ? seconds : other;
        return make_uint2(__byte_perm(even_lanes, odd_lanes, LOW_HALVES),
                          __byte_perm(even_lanes, odd_lanes, HIGH_HALVES));
    }

    // Each warpgroup pushes its part of the accumulators and stores the pieces it owns.
    __device__ __forceinline__ void store_shared_sum(const Accumulators& acc, const Parts& parts, int warp_pixel,
                                                     int first_filter) const {
        constexpr int BLOCKS = COLUMNS / 8;
        const int lane = threadIdx.x % 32, consumer = threadIdx.x / 128 - 1, sharer = DEPTH ? consumer : 0;
        const auto filter_of = [&](int piece) { return first_filter + piece % BLOCKS * 8 + lane % 4 * 2; };
        if (!PARTS_APART) {
            if (SPLITS > 1) cluster_sync();
            else consumers_sync();
        }
        parts.push(acc[0], DEPTH ? 2 * parts.rank + consumer : parts.rank);
        if (SPLITS == 1) consumers_sync();
        const int count = parts.count(sharer);
        for (int start = 0; start < count; start += Parts::AT_ONCE) {
            FilterPair pairs[Parts::AT_ONCE];  // loaded while the parts are in flight
#pragma unroll
            for (int i = 0; i < Parts::AT_ONCE; ++i)
                if (start + i < count) pairs[i] = finish.of(filter_of(parts.piece(sharer, start + i)));
            parts.wait(sharer);
            Sum totals[Parts::AT_ONCE][4];
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
