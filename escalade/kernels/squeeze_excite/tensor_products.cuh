// Products of a layer with the rows of up to eight images on tensor cores, by all THREADS threads of a CTA. Rows are
// fp32: each value is the sum of two Elements, multiplied one after the other.
#pragma once

#include "common/elements.cuh"
#include "common/mma_tile.cuh"

// Row pitch for `depth` values: rows of different images are in different banks.
__device__ constexpr int spread(int depth) { return (depth + 15) / 16 * 16 + 8; }

struct Halves {
    Element *high, *low;

    __device__ __forceinline__ void store(int at, float value) const {
        const bool finite = fabsf(value) < __uint_as_float(0x7f800000);
        high[at] = from_float<Element>(finite ? within(value) : value);
        low[at] = from_float<Element>(finite ? within(value - to_float(high[at])) : 0.f);
    }

private:
    // Clamps to the largest Element: an infinite half would make the other NaN.
    __device__ __forceinline__ static float within(float value) { return fminf(fmaxf(value, -LARGEST), LARGEST); }
};

// Calls found(row, image, sum) for the products of every row of a matrix with values[IMAGES][stride]. A warp has 16
// rows at once; past the last row and image it repeats them, past the last column it adds zeros.
template <class Found>
__device__ __forceinline__ void multiply_by_mma(const Element* weight, int pitch, int rows, int depth,
                                                const Halves& values, int stride, Found found) {
    static_assert(IMAGES <= 8, "an MMA has eight columns");
    const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
    const auto pair = [](const Element* from) { return *reinterpret_cast<const u32*>(from); };
    const int row_of_values = min(group, IMAGES - 1) * stride;
    const Element *high = values.high + row_of_values, *low = values.low + row_of_values;
#pragma unroll 1
    for (int first = threadIdx.x / 32 * 16; first < rows; first += THREADS / 32 * 16) {
        const Element* upper = weight + min(first + group, rows - 1) * pitch;
        const Element* lower = weight + min(first + group + 8, rows - 1) * pitch;
        float sums[2][4] = {};
#pragma unroll 4
        for (int step = 2 * member; step < depth + 2 * member; step += 16) {
            const bool here = step < depth, there = step + 8 < depth;
            const int k = min(step, depth - 2), next = min(step + 8, depth - 2);
            const u32 a[4] = {pair(upper + k), pair(lower + k), pair(upper + next), pair(lower + next)};
            u32 highs[2] = {pair(high + k), pair(high + next)}, lows[2] = {pair(low + k), pair(low + next)};
            highs[0] = here ? highs[0] : 0, highs[1] = there ? highs[1] : 0;
            lows[0] = here ? lows[0] : 0, lows[1] = there ? lows[1] : 0;
            multiply_add<Element>(sums[0], a, highs);
            multiply_add<Element>(sums[1], a, lows);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first + group + i / 2 * 8, image = 2 * member + i % 2;
            if (row < rows && image < IMAGES) found(row, image, sums[0][i] + sums[1][i]);
        }
    }
}
