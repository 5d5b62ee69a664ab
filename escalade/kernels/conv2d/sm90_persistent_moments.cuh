// Mean and squared deviations of each filter's results, for the batch normalization that follows: it then need not read
// y for them. One warpgroup's results; a later launch merges all of them (batch_statistics/split_merge.cu).
//
// Read from the staging tiles, so that they are of the results as stored. Of a staging tile's 64 filters each warp takes
// 16, and of its 64 rows each lane 16: eight lanes read the pairs of one row, and the four rows of a load are in
// different banks. Sums are of differences from the warpgroup's first pixel, which are small, and so are their rounding
// errors. Partial sums stay in registers from tile to tile, which needs all tiles of a CTA to have the same filters.
#pragma once

#include "common/warp.cuh"
#include "conv2d/sm90_persistent_tile.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool STATISTICS = false;  // statistics: write each filter's mean and squared deviations
#endif

static_assert(!STATISTICS || (BUFFERS > 0 && CLUSTER == 1 && CLASSES == 1 && !PLACED && !HAS_AUX),
              "statistics are read from staging tiles, which no residual overwrites");

template <class Stored>
__device__ __forceinline__ float2 load_shared_pair(u32 address) {
    if constexpr (sizeof(Stored) == 4) return make_float2(load_shared(address), load_shared(address + 4));
    else return unpack_pair<Stored>(__float_as_uint(load_shared(address)));
}

struct FilterMoments {
    static constexpr int PANELS = WG_FILTERS / 64 + (WG_FILTERS < 64);  // of 64 filters
    float2 shift[PANELS], sums[PANELS], squares[PANELS];
    int count = 0;  // pixels so far

    __device__ __forceinline__ FilterMoments() {
        for (int panel = 0; panel < PANELS; ++panel) shift[panel] = sums[panel] = squares[panel] = make_float2(0.f, 0.f);
    }

    __device__ __forceinline__ static int filter() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 8 * 2; }

    // Adds `rows` rows of a staging tile, whose pairs are at `address(row, filter)`. `first`: they are the first ones.
    template <class Stored, class Address>
    __device__ __forceinline__ void add(int panel, int rows, bool first, const Address& address) {
        const int lane = threadIdx.x % 32, top = lane / 8 % 2 * 4 + lane / 16 * 2;
        const u32 even = address(top, filter()), odd = address(top + 1, filter());  // swizzles repeat every 8 rows
        if (first) {  // row 0 is in lanes 0 to 7
            const float2 value = load_shared_pair<Stored>(even);
            shift[panel] =
                make_float2(__shfl_sync(ALL_LANES, value.x, lane % 8), __shfl_sync(ALL_LANES, value.y, lane % 8));
        }
        if (rows >= 64) {
#pragma unroll
            for (int at = 0; at < 64; at += 32) {
                float2 values[8];  // all in flight
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    values[i] = load_shared_pair<Stored>((i % 2 ? odd : even) + (at + i / 2 * 8) * ROW_BYTES);
#pragma unroll
                for (int i = 0; i < 8; ++i) add(panel, values[i]);
            }
        } else {
#pragma unroll 1
            for (int at = 0; at < 64; at += 8) {
                if (at + top < rows) add(panel, load_shared_pair<Stored>(even + at * ROW_BYTES));
                if (at + top + 1 < rows) add(panel, load_shared_pair<Stored>(odd + at * ROW_BYTES));
            }
        }
    }

    __device__ __forceinline__ void add(int panel, float2 value) {
        const float low = value.x - shift[panel].x, high = value.y - shift[panel].y;
        sums[panel].x += low, sums[panel].y += high;
        squares[panel].x += low * low, squares[panel].y += high * high;
    }

    // partial[0][split][filter] = mean, partial[1][split][filter] = squared deviations; zeros if there was no pixel.
    __device__ __forceinline__ void store(float* partial, int split, int splits, int first_filter, int filters) {
        const auto over_rows = [](float value) {
            value += __shfl_xor_sync(ALL_LANES, value, 8);
            return value + __shfl_xor_sync(ALL_LANES, value, 16);
        };
        const float share = count > 0 ? 1.f / static_cast<float>(count) : 0.f;
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            const float2 sum = make_float2(over_rows(sums[panel].x), over_rows(sums[panel].y));
            const float2 square = make_float2(over_rows(squares[panel].x), over_rows(squares[panel].y));
            const int at = first_filter + panel * 64 + filter();
            if (threadIdx.x % 32 >= 8 || at >= filters) continue;
            const float2 moved = make_float2(sum.x * share, sum.y * share);
            float* to = partial + 1LL * split * filters + at;
            *reinterpret_cast<float2*>(to) = make_float2(shift[panel].x + moved.x, shift[panel].y + moved.y);
            *reinterpret_cast<float2*>(to + 1LL * splits * filters) =
                make_float2(fmaxf(square.x - sum.x * moved.x, 0.f), fmaxf(square.y - sum.y * moved.y, 0.f));
        }
    }
};
