// Epilogue of a warp: pooling, scaling, bias and ReLU, from registers to y.
#pragma once

#include "common/epilogue.cuh"
#include "common/halves.cuh"
#include "common/pairs.cuh"
#include "few_channels/tensor_core_products.cuh"

// Scale, bias and ReLU of one filter.
struct Epilogue {
    float bias[LANE_FILTERS];
    float scale[LANE_FILTERS];

    __device__ __forceinline__ Epilogue(const Element* biases, int first) {
#pragma unroll
        for (int f = 0; f < LANE_FILTERS; ++f)
            bias[f] = HAS_BIAS && first + f < FILTERS ? to_float(biases[first + f]) : 0.f;
    }

    __device__ __forceinline__ void move_to(int tile_exponent, const int* exponents, int first) {
#pragma unroll
        for (int f = 0; f < LANE_FILTERS; ++f)
            scale[f] = power_of_two(-(tile_exponent + (first + f < FILTERS ? exponents[first + f] : 0)));
    }

    __device__ __forceinline__ float operator()(float sum, int f) const {
        if (SPLIT) sum *= scale[f];
        if (HAS_BIAS) sum += bias[f];
        return activated<HAS_RELU>(sum);
    }
};

// Stores consecutive elements; ALIGNED is known at compile time.
template <bool ALIGNED, int COUNT>
__device__ __forceinline__ void store(Element* y, const float (&values)[COUNT], int exist) {
    if constexpr (ALIGNED) {
        if constexpr (sizeof(Element) == 2 && COUNT % 2 == 0) {
            Pack<u32, COUNT / 2> pairs;
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i) pairs.at[i] = pack_pair<Element>(values[2 * i], values[2 * i + 1]);
            store_pack(reinterpret_cast<u32*>(y), pairs);
        } else {
            Pack<Element, COUNT> pack;
            from_floats(pack, values);
            store_pack(y, pack);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (i < exist) y[i] = from_float<Element>(values[i]);
    }
}

// A lane's share of the output rows of one block: two pairs of columns, or one window of two pairs.
struct Writer {
    // Missing parts of a pooling window: rows (of a block, from this one on), pairs, the second pixel of a pair.
    static constexpr int SURE_ROWS = OUTPUT_HEIGHT * POOL > CONV_HEIGHT ? CONV_HEIGHT - (ROW_BLOCKS - 1) * ROWS : ROWS;
    static constexpr bool MASK_PAIRS = !NARROW && OUTPUT_WIDTH * POOL >= CONV_WIDTH + 2;
    static constexpr bool MASK_COLUMNS = OUTPUT_WIDTH * POOL > CONV_WIDTH && CONV_WIDTH % 2;
    static constexpr int CELLS = NARROW ? 2 : 2 / PAIRS_IN_CELL;
    const Epilogue& epilogue;
    int filters;    // existing filters of this lane
    Element* y[2];  // first element, of both pairs or cells
    int rows[2];    // existing rows of y
    int conv_rows[2];
    int columns[2];  // existing columns of a pair
    bool narrow;     // windows of one pair each
    float maxima[TILES_N][2];

    __device__ __forceinline__ Writer(const Epilogue& epilogue, Element* y, int images, int m, int unit)
        : epilogue(epilogue) {
        const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
        const int filter = first_filter(unit, member);
        filters = FILTERS - filter;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const RowPosition position(m, group + 8 * h);
            const int column = 2 * position.pair + lane_offset(unit, member);
            const int output_row = position.row / POOL, output_column = column / POOL;
            conv_rows[h] = CONV_HEIGHT - position.row;
            columns[h] = CONV_WIDTH - column;
            narrow = position.narrow;
            const bool exists = position.exists && position.cell < images * CELLS_IN_IMAGE && filters > 0 &&
                                (POOL > 1 || columns[h] > 0) && (!NARROW || narrow || h == 0);
            rows[h] = exists ? OUTPUT_HEIGHT - output_row : 0;
            const int pixel = output_row * OUTPUT_WIDTH + output_column;
            this->y[h] = y + position.image * OUTPUT_IMAGE +
                         (NHWC ? pixel * FILTERS + filter : filter * OUTPUT_HEIGHT * OUTPUT_WIDTH + pixel);
        }
    }

    __device__ __forceinline__ void add(int r, const Accumulators& acc) {
        if constexpr (POOL > 1) {
            pool(r, acc);
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if constexpr (PAIRED) {
                    if (r < rows[h]) store_columns(y[h] + r * OUTPUT_WIDTH, acc, h);
                } else {
                    float values[LANE_FILTERS];
#pragma unroll
                    for (int f = 0; f < LANE_FILTERS; ++f) values[f] = epilogue(acc[f / 2][2 * h + f % 2], f);
                    if (r < rows[h])
                        store<FILTERS % LANE_FILTERS == 0>(y[h] + r * OUTPUT_WIDTH * FILTERS, values,
                                                           filters);
                }
            }
        }
    }

private:
    // NCHW: two columns of each filter.
    __device__ __forceinline__ void store_columns(Element* pixel, const Accumulators& acc, int h) {
#pragma unroll
        for (int t = 0; t < TILES_N; ++t)
            if (t < filters) {
                const float values[2] = {epilogue(acc[t][2 * h], t), epilogue(acc[t][2 * h + 1], t)};
                store<OUTPUT_WIDTH % 2 == 0>(pixel + t * OUTPUT_HEIGHT * OUTPUT_WIDTH, values, columns[h]);
            }
    }

    __device__ __forceinline__ void pool(int r, const Accumulators& acc) {
        const float lowest = -__uint_as_float(INFINITY_BITS);
#pragma unroll
        for (int t = 0; t < TILES_N; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float right = MASK_COLUMNS && columns[h] < 2 ? lowest : acc[t][2 * h + 1];
                float larger = max_nan(acc[t][2 * h], right);
                if ((r >= SURE_ROWS && r >= conv_rows[h]) || (MASK_PAIRS && columns[h] < 1)) larger = lowest;
                float& most = maxima[t][h % CELLS];
                most = r % POOL == 0 && h < CELLS ? larger : max_nan(most, larger);
            }
        if (r % POOL < POOL - 1) return;
        if (NARROW && !narrow)
#pragma unroll
            for (int t = 0; t < TILES_N; ++t) maxima[t][0] = max_nan(maxima[t][0], maxima[t][1]);
#pragma unroll
        for (int h = 0; h < CELLS; ++h) {
            float values[TILES_N];
#pragma unroll
            for (int t = 0; t < TILES_N; ++t) values[t] = epilogue(maxima[t][h], t);
            if (r / POOL < rows[h]) {
                Element* pixel = y[h] + r / POOL * OUTPUT_WIDTH * (NHWC ? FILTERS : 1);
                if constexpr (NHWC) {
                    store<FILTERS % TILES_N == 0>(pixel, values, filters);
                } else {
#pragma unroll
                    for (int t = 0; t < TILES_N; ++t)
                        if (t < filters) pixel[t * OUTPUT_HEIGHT * OUTPUT_WIDTH] = from_float<Element>(values[t]);
                }
            }
        }
    }
};
