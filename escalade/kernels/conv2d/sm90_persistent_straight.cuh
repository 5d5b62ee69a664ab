// Epilogue of a persistent CTA directly from registers to y; split-K parts are reduced first.
#pragma once

#include "common/warp.cuh"
#include "conv2d/sm90_persistent_tile.cuh"
#include "conv2d/placement.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool PITCHED = false;  // y_pitch > 0
#endif

// PERMUTED: column 8j + q of 64 is filter 8q + j (conv2d/rungs/wgmma_conv.py), so a lane holds 16 adjacent filters.
// Residuals of a group of 64, and of the next, in words of four.
struct Lines {
    u32 of[2][ATOMS][2][4];
};

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

    // Brings the rows of a warpgroup's tile in another tensor of y's shape into L2, a tile ahead of those that read them.
    template <class T>
    __device__ __forceinline__ void prefetch(const T* tensor, int first_pixel, int first_filter) const {
        constexpr int LINE = 128 / sizeof(T);
#pragma unroll
        for (int row = threadIdx.x % 128; row < WG_PIXELS; row += 128)
#pragma unroll
            for (int column = 0; column < WG_FILTERS; column += LINE)
                if (first_pixel + row < pixels && first_filter + column < shape.filters)
                    prefetch_line(tensor + 1LL * (first_pixel + row) * shape.filters + first_filter + column);
    }

    // Call for group 0 before the mainloop, which hides the latency.
    __device__ __forceinline__ void load(Lines& lines, int group, int warp_pixel, int first_filter) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < ATOMS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int pixel = warp_pixel + i * 64 + half * 8 + lane / 4;
                uint4 loaded = make_uint4(0, 0, 0, 0);
                if (pixel < pixels)
                    loaded = *reinterpret_cast<const uint4*>(finish.residual + offset(pixel) + first_filter +
                                                             group * 64 + lane % 4 * 16);
                u32(&line)[4] = lines.of[group % 2][i][half];
                line[0] = loaded.x, line[1] = loaded.y, line[2] = loaded.z, line[3] = loaded.w;
            }
    }

    __device__ __forceinline__ void store(const Accumulators& acc, Lines& lines, int warp_pixel, int first_filter) const {
        if constexpr (PERMUTED) {
            store_adjacent<Output>(acc, lines, warp_pixel, first_filter);
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

    // 16 adjacent filters of a pixel at a time, in stores of 16 bytes. A template because wider results have no packs.
    template <class Result>
    __device__ __forceinline__ void store_adjacent(const Accumulators& acc, Lines& lines, int warp_pixel,
                                                   int first_filter) const {
        constexpr int SIZE = sizeof(Result), FOURS = 4 / SIZE;  // fours of filters per store
        const int lane = threadIdx.x % 32;
        warp_pixel = anew(warp_pixel);  // offsets of residuals must not stay in registers during the mainloop
#pragma unroll
        for (int group = 0; group < COLUMNS / 64; ++group) {
            const int filter = first_filter + group * 64 + lane % 4 * 16;
            u32 words[ATOMS][2][4];
#pragma unroll
            for (int four = 0; four < 4; ++four) {
                const FourFilters<Result> filters(finish, filter + four * 4);
                // Half of this group's accumulators are free by now.
                if (HAS_RESIDUAL && four == 2 && group + 1 < COLUMNS / 64)
                    load(lines, group + 1, warp_pixel, first_filter);
#pragma unroll
                for (int i = 0; i < ATOMS; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const Sum* sums = &acc[i][(group * 8 + four % 2 * 4) * 4 + half * 2 + four / 2];
                        const float values[4] = {float(sums[0]), float(sums[4]), float(sums[8]), float(sums[12])};
                        const auto results = filters.finished(values, lines.of[group % 2][i][half][four]);
                        u32(&line)[4] = HAS_RESIDUAL && SIZE == 1 ? lines.of[group % 2][i][half] : words[i][half];
#pragma unroll
                        for (int word = 0; word < SIZE; ++word) line[four % FOURS * SIZE + word] = results.at[word];
                    }
                if (four % FOURS < FOURS - 1) continue;
#pragma unroll
                for (int i = 0; i < ATOMS; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int pixel = warp_pixel + i * 64 + half * 8 + lane / 4;
                        const u32(&line)[4] = HAS_RESIDUAL && SIZE == 1 ? lines.of[group % 2][i][half] : words[i][half];
                        if (pixel < pixels)
                            *reinterpret_cast<uint4*>(y + offset(pixel) + filter + four / FOURS * FOURS * 4) =
                                make_uint4(line[0], line[1], line[2], line[3]);
                    }
            }
        }
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
