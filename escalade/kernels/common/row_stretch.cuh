// Inputs of a run of windows in one row of a plane, NCHW.
//
// The windows of adjacent threads, OUTPUT_COLUMNS each, are BODY columns apart: whole packs of VECTOR, loaded as such.
// What windows cover beyond these, BEFORE and BEHIND, is loaded element by element.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "common/window_size.cuh"

constexpr int BODY = OUTPUT_COLUMNS * STRIDE_W;
constexpr int BEFORE = PAD_W;
constexpr int BEHIND = KERNEL_W - PAD_W - STRIDE_W > 0 ? KERNEL_W - PAD_W - STRIDE_W : 0;
static_assert(BODY % VECTOR == 0, "whole packs");

struct RowInputs {
    Element at[BEFORE + BODY + BEHIND];  // the window of output j begins at j * STRIDE_W

    // `column` is the first of the body; elements outside the row are set to `outside`.
    __device__ __forceinline__ void load(const Element* row, int column, int width, Element outside) {
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) at[i] = one(row, column - BEFORE + i, width, outside);
#pragma unroll
        for (int first = 0; first < BODY; first += VECTOR) {
            Pack<Element, VECTOR> pack;
            const bool inside = column + first < width;
            if (inside) pack = load_pack<Element, VECTOR>(row + column + first);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) at[BEFORE + first + e] = inside ? pack.at[e] : outside;
        }
#pragma unroll
        for (int i = 0; i < BEHIND; ++i) at[BEFORE + BODY + i] = one(row, column + BODY + i, width, outside);
    }

    __device__ __forceinline__ static Element one(const Element* row, int column, int width, Element outside) {
        return column >= 0 && column < width ? row[column] : outside;
    }
};

// Outputs of a thread: a run of OUTPUT_COLUMNS in OUTPUT_ROWS rows of one plane.
struct Run {
    int column, row;
    long long plane;

    __device__ __forceinline__ Run(int output_height, int output_width) {
        const u32 runs = (output_width + OUTPUT_COLUMNS - 1) / OUTPUT_COLUMNS;
        const u32 bands = (output_height + OUTPUT_ROWS - 1) / OUTPUT_ROWS;
        u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
        column = rest % runs * OUTPUT_COLUMNS;
        rest /= runs;
        row = rest % bands * OUTPUT_ROWS;
        plane = rest / bands;
    }

    // Stores the run to a row of y that starts at `results`, STORED elements at a time; STORED divides rows of y.
    template <class Result>
    __device__ __forceinline__ void store(Result* results, int output_width,
                                          const Result (&found)[OUTPUT_COLUMNS]) const {
#pragma unroll
        for (int first = 0; first < OUTPUT_COLUMNS; first += STORED) {
            if (column + first >= output_width) return;
            Pack<Result, STORED> pack;
#pragma unroll
            for (int e = 0; e < STORED; ++e) pack.at[e] = found[first + e];
            store_pack(results + column + first, pack);
        }
    }
};
