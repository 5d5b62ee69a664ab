// Sums over pixels per filter, for batch normalization, which then need not read y for them. Either mean and squared
// deviations, for a normalization of y; or, if y is the gradient of a normalization's result, the sums for that one's
// gradients. Each warpgroup writes partial sums; a later launch merges them (batch_statistics/split_merge.cu and
// batch_norm_backward/split_merge.cu).
//
// Results are read back from the staging tiles, so the sums include their rounding. Each warp takes 16 of a staging
// tile's 64 filters, each lane 16 of its 64 rows: eight lanes read the pairs of one row, and the four rows of a load
// are in different banks. Summands are differences from the warpgroup's first pixel: they are small, and so are their
// rounding errors. Partial sums stay in registers from tile to tile, so all tiles of a CTA must have the same filters.
#pragma once

#include "common/warp.cuh"
#include "conv2d/sm90_persistent_tile.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool STATISTICS = false;  // statistics: write each filter's mean and squared deviations
constexpr int NORM = 0;             // norm: y is the gradient of a normalization's result: see below
#endif

// NORM: 0: y is something else; 1: it has no ReLU; its ReLU's mask is found 2: from its x, 3: from its output.
constexpr bool HAS_NORM = NORM > 0, MASK_BY_X = NORM == 2, MASK_BY_OUTPUT = NORM == 3, HAS_SUMS = STATISTICS || HAS_NORM;
static_assert(!HAS_SUMS || (BUFFERS > 0 && CLUSTER == 1 && CLASSES == 1 && !PLACED),
              "sums are of whole staging tiles");
static_assert(!HAS_NORM || sizeof(Output) == 2, "pairs are packed in registers");
static_assert(!STATISTICS || (!HAS_AUX && !HAS_NORM), "no residual overwrites the staging tiles");

template <class Stored>
__device__ __forceinline__ float2 load_shared_pair(u32 address) {
    if constexpr (sizeof(Stored) == 4) return make_float2(load_shared(address), load_shared(address + 4));
    else return unpack_pair<Stored>(__float_as_uint(load_shared(address)));
}

constexpr int PANELS = WG_FILTERS / 64 + (WG_FILTERS < 64);  // of 64 filters

// This lane's first filter of a panel, and its first row: rows top, top + 1, top + 8, top + 9 and so on.
__device__ __forceinline__ int lane_filter() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 8 * 2; }
__device__ __forceinline__ int lane_top() { return threadIdx.x / 8 % 2 * 4 + threadIdx.x % 32 / 16 * 2; }

__device__ __forceinline__ float2 over_rows(float2 sums) {
#pragma unroll
    for (int distance = 8; distance <= 16; distance *= 2) {
        sums.x += __shfl_xor_sync(ALL_LANES, sums.x, distance);
        sums.y += __shfl_xor_sync(ALL_LANES, sums.y, distance);
    }
    return sums;
}

// Destination of a warpgroup's sums: partial[0][split][filter] and partial[1][split][filter].
struct PartialSums {
    float* partial;
    int split, splits, first_filter, filters;

    __device__ __forceinline__ void store(int panel, float2 first, float2 second) const {
        const int filter = first_filter + panel * 64 + lane_filter();
        if (threadIdx.x % 32 >= 8 || filter >= filters) return;
        float* to = partial + 1LL * split * filters + filter;
        *reinterpret_cast<float2*>(to) = first;
        *reinterpret_cast<float2*>(to + 1LL * splits * filters) = second;
    }
};

struct FilterMoments {
    float2 shift[PANELS], sums[PANELS], squares[PANELS];
    int count = 0;  // pixels so far

    __device__ __forceinline__ FilterMoments() {
        for (int panel = 0; panel < PANELS; ++panel) shift[panel] = sums[panel] = squares[panel] = make_float2(0.f, 0.f);
    }

    // Adds `rows` rows of a staging tile, whose pairs are at `address(row, filter)`. `first`: they are the first ones.
    template <class Stored, class Address>
    __device__ __forceinline__ void add(int panel, int rows, bool first, const Address& address) {
        const int lane = threadIdx.x % 32, top = lane_top();
        // swizzles repeat every 8 rows
        const u32 even = address(top, lane_filter()), odd = address(top + 1, lane_filter());
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

    // Means, and squared deviations; zeros if there was no pixel.
    __device__ __forceinline__ void store(const PartialSums& to) const {
        const float share = count > 0 ? 1.f / static_cast<float>(count) : 0.f;
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            const float2 sum = over_rows(sums[panel]), square = over_rows(squares[panel]);
            const float2 moved = make_float2(sum.x * share, sum.y * share);
            to.store(panel, make_float2(shift[panel].x + moved.x, shift[panel].y + moved.y),
                     make_float2(fmaxf(square.x - sum.x * moved.x, 0.f), fmaxf(square.y - sum.y * moved.y, 0.f)));
        }
    }
};

// A batch normalization, y = relu((x - mean) * rstd * weight + bias + residual) with optional ReLU; the results of this
// kernel are the gradient of its y.
struct Normalization {
    const Output *x, *output;
    const float *mean, *rstd, *weight, *bias;
};

// Sums of g and of g * (x - mean), where g is the gradient before the ReLU. It replaces the results in the staging
// tile.
struct GradientSums {
    const Normalization& norm;
    float2 sums[PANELS], products[PANELS];

    __device__ __forceinline__ GradientSums(const Normalization& norm) : norm(norm) {
        for (int panel = 0; panel < PANELS; ++panel) sums[panel] = products[panel] = make_float2(0.f, 0.f);
    }

    struct Loaded {  // half of this lane's pairs of a staging tile; zeros where there is no pixel
        u32 xs[8], outputs[8];
    };

    // Position for `load` and `add`: a staging tile's first pixel and filter, and the number of existing rows.
    struct Place {
        int pixel, rows, filter, filters;

        // The lane's row number i of 16, and whether it exists.
        __device__ __forceinline__ static int down(int i) { return i / 2 * 8 + i % 2; }
        __device__ __forceinline__ bool has(int i) const { return rows >= 64 || lane_top() + down(i) < rows; }
    };

    // The pairs from number `at` on. Call it well before `add`, so that the loads overlap the work in between.
    __device__ __forceinline__ Loaded load(const Place& place, int at) const {
        const int channel = place.filter + lane_filter();
        const long long first = 1LL * (place.pixel + lane_top()) * place.filters + channel;
        Loaded loaded{};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 offset = static_cast<u32>(Place::down(at + i)) * place.filters;
            if (!place.has(at + i) || channel >= place.filters) continue;
            loaded.xs[i] = load_early(norm.x + first + offset);
            if (MASK_BY_OUTPUT) loaded.outputs[i] = load_early(norm.output + first + offset);
        }
        return loaded;
    }

    // Adds a staging tile, whose pairs are at `address(row, filter)`. `half` is its first half of x, and output.
    template <class Stored, class Address>
    __device__ __forceinline__ void add(int panel, const Place& place, const Loaded& half, const Address& address) {
        const Loaded other = load(place, 8);
        const int top = lane_top(), channel = place.filter + lane_filter();
        if (channel >= place.filters) return;
        const u32 even = address(top, lane_filter()), odd = address(top + 1, lane_filter());
        const float2 mean = load_floats(norm.mean + channel);
        float2 scale{}, bias{};
        if constexpr (MASK_BY_X) {
            const float2 rstd = load_floats(norm.rstd + channel), weight = load_floats(norm.weight + channel);
            scale = make_float2(weight.x * rstd.x, weight.y * rstd.y), bias = load_floats(norm.bias + channel);
        }
#pragma unroll
        for (int at = 0; at < 16; at += 8) {
            const Loaded& loaded = at == 0 ? half : other;
            u32 gradients[8];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                gradients[i] = __float_as_uint(load_shared((i % 2 ? odd : even) + (at + i) / 2 * 8 * ROW_BYTES));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float2 g = unpack_pair<Stored>(gradients[i]);
                const float2 x = unpack_pair<Stored>(loaded.xs[i]);
                const float2 distance = make_float2(x.x - mean.x, x.y - mean.y);
                if constexpr (NORM > 1) {
                    u32 raw = loaded.outputs[i];
                    if constexpr (MASK_BY_X)  // rounded as it was stored
                        raw = pack_pair<Stored>(distance.x * scale.x + bias.x, distance.y * scale.y + bias.y);
                    const float2 output = unpack_pair<Stored>(raw);
                    if (output.x <= 0.f) g.x = 0.f;
                    if (output.y <= 0.f) g.y = 0.f;
                    gradients[i] = pack_pair<Stored>(g.x, g.y);
                }
                if (!place.has(at + i)) g = make_float2(0.f, 0.f);
                sums[panel].x += g.x, sums[panel].y += g.y;
                products[panel].x += g.x * distance.x, products[panel].y += g.y * distance.y;
            }
#pragma unroll
            for (int i = 0; i < (NORM > 1 ? 8 : 0); ++i)
                store_shared((i % 2 ? odd : even) + (at + i) / 2 * 8 * ROW_BYTES, __uint_as_float(gradients[i]));
        }
    }

    __device__ __forceinline__ void store(const PartialSums& to) const {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            to.store(panel, over_rows(sums[panel]), over_rows(products[panel]));
    }

private:
    __device__ __forceinline__ static float2 load_floats(const float* from) {
        return *reinterpret_cast<const float2*>(from);
    }
};
