// A warp's 16 rows of a block of columns, in three register forms (columns.cuh defines which lane holds what): as
// stored, as fp32 values, and as MMA operands; their loads and stores, and LayerNorm. The prelude defines `Element`.
#pragma once

#include "mlp/columns.cuh"
#include "mlp/operand.cuh"

// A lane's share of 16 rows of a block, as stored: [step][first or second pair][row].
template <int COLUMNS>
struct Raw {
    ElementPair<Element> at[steps_of(COLUMNS)][2][2];
};

// Values in fp32, as MMA accumulators: [eight columns][row 0: two columns, row 1: two columns].
template <int COLUMNS>
struct Values {
    float at[2 * steps_of(COLUMNS)][4];
};

// Values as MMA operands.
template <int COLUMNS>
struct Operand {
    Step<Element> at[steps_of(COLUMNS)];
};

// ------------------------------------------------------------------ loads and stores

// Piece of a lane's share of a row: VECTOR elements per access, as whole pairs if there are any.
template <int VECTOR>
struct Piece {
    Pack<ElementPair<Element>, VECTOR / 2> pairs;
    __device__ __forceinline__ static Piece* in(const Element* row) {
        return reinterpret_cast<Piece*>(const_cast<Element*>(row));
    }
    __device__ __forceinline__ void get(ElementPair<Element> (&lane)[4], int e) const {
#pragma unroll
        for (int i = 0; i < VECTOR / 2; ++i) lane[e / 2 + i] = pairs.at[i];
    }
    __device__ __forceinline__ void set(const ElementPair<Element> (&lane)[4], int e) {
#pragma unroll
        for (int i = 0; i < VECTOR / 2; ++i) pairs.at[i] = lane[e / 2 + i];
    }
    __device__ __forceinline__ void store(Element* row) const {
        if constexpr (sizeof(Piece) == 16)
            store_16(row, *reinterpret_cast<const uint4*>(this));
        else
            *in(row) = *this;
    }
};

template <>
struct Piece<1> {
    Element one;
    __device__ __forceinline__ static Piece* in(const Element* row) {
        return reinterpret_cast<Piece*>(const_cast<Element*>(row));
    }
    __device__ __forceinline__ void get(ElementPair<Element> (&lane)[4], int e) const {
        lane[e / 2].set_one(e % 2, one);
    }
    __device__ __forceinline__ void set(const ElementPair<Element> (&lane)[4], int e) { one = lane[e / 2].one(e % 2); }
    __device__ __forceinline__ void store(Element* row) const { *row = one; }
};

// True if a column of a block that begins at `first` exists; a compile-time constant if blocks and steps divide evenly.
template <int COLUMNS, int WIDTH>
__device__ __forceinline__ bool is_there(int first, int column) {
    return (COLUMNS % 16 == 0 || column < COLUMNS) && (WIDTH % COLUMNS == 0 || first + column < WIDTH);
}

// Columns `first` to `first + COLUMNS` of a lane's two rows, zero where there are none. Rows past the last repeat it:
// their results are not stored.
template <int COLUMNS, int WIDTH, int VECTOR>
__device__ __forceinline__ void load(Raw<COLUMNS>& raw, const Element* x, long long row, long long rows, int first,
                                     int member) {
    constexpr int STEPS = steps_of(COLUMNS);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const Element* at = x + min(row + 8 * r, rows - 1) * WIDTH + first;
#pragma unroll
        for (int step = 0; step < STEPS; step += 2) {
            const int here = step + 1 < STEPS ? 8 : 4;
            ElementPair<Element> lane[4];
#pragma unroll
            for (int e = 0; e < here; e += VECTOR) {
                const int column = column_of(COLUMNS, step, member, 0) + e;
                Piece<VECTOR> piece{};
                if (is_there<COLUMNS, WIDTH>(first, column)) piece = *Piece<VECTOR>::in(at + column);
                piece.get(lane, e);
            }
#pragma unroll
            for (int pair = 0; pair < here / 2; ++pair) raw.at[step + pair / 2][pair % 2][r] = lane[pair];
        }
    }
}

template <int COLUMNS, int WIDTH, int VECTOR>
__device__ __forceinline__ void store(const Values<COLUMNS>& values, Element* y, long long row, long long rows,
                                      int first, int member) {
    constexpr int STEPS = steps_of(COLUMNS);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        Element* at = y + (row + 8 * r) * WIDTH + first;
#pragma unroll
        for (int step = 0; step < STEPS; step += 2) {
            const int here = step + 1 < STEPS ? 8 : 4;
            ElementPair<Element> lane[4];
#pragma unroll
            for (int pair = 0; pair < here / 2; ++pair)
                lane[pair].set(values.at[2 * step + pair][2 * r], values.at[2 * step + pair][2 * r + 1]);
#pragma unroll
            for (int e = 0; e < here; e += VECTOR) {
                const int column = column_of(COLUMNS, step, member, 0) + e;
                Piece<VECTOR> piece;
                piece.set(lane, e);
                if (row + 8 * r < rows && is_there<COLUMNS, WIDTH>(first, column)) piece.store(at + column);
            }
        }
    }
}

// ------------------------------------------------------------------ values to operands and back

template <int COLUMNS>
__device__ __forceinline__ void widen(Values<COLUMNS>& values, const Raw<COLUMNS>& raw) {
#pragma unroll
    for (int tile = 0; tile < 2 * steps_of(COLUMNS); ++tile)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float2 pair = raw.at[tile / 2][tile % 2][r].wide();
            values.at[tile][2 * r] = pair.x, values.at[tile][2 * r + 1] = pair.y;
        }
}

__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(0xFFFFFFFF, value, 1);
    return value + __shfl_xor_sync(0xFFFFFFFF, value, 2);
}

// (x - mean) / deviation of each row; the padding columns of the last step are ignored.
template <int COLUMNS>
__device__ __forceinline__ void normalize(Values<COLUMNS>& values, float epsilon, int member) {
    constexpr int STEPS = steps_of(COLUMNS);
    float sum[2] = {}, squares[2] = {};
#pragma unroll
    for (int tile = 0; tile < 2 * STEPS; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i / 2] += values.at[tile][i];
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = quad_sum(sum[r]) * (1.f / COLUMNS);
#pragma unroll
    for (int tile = 0; tile < 2 * STEPS; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values.at[tile][i] -= sum[i / 2];
            if (COLUMNS % 16 && column_of(COLUMNS, tile / 2, member, tile % 2 * 2 + i % 2) >= COLUMNS)
                values.at[tile][i] = 0.f;
            squares[i / 2] += values.at[tile][i] * values.at[tile][i];
        }
#pragma unroll
    for (int r = 0; r < 2; ++r) squares[r] = rsqrtf(quad_sum(squares[r]) * (1.f / COLUMNS) + epsilon);
#pragma unroll
    for (int tile = 0; tile < 2 * STEPS; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) values.at[tile][i] *= squares[i / 2];
}

template <int COLUMNS>
__device__ __forceinline__ void to_operand(Operand<COLUMNS>& operand, const Values<COLUMNS>& values) {
#pragma unroll
    for (int step = 0; step < steps_of(COLUMNS); ++step)
        operand.at[step].set(values.at[2 * step], values.at[2 * step + 1]);
}
