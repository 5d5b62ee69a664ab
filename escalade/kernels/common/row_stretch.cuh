// Inputs of a run of windows in one row of a plane, NCHW.
//
// The windows of adjacent threads, OUTPUT_COLUMNS each, are BODY columns apart: whole packs of VECTOR, loaded as such.
// What windows cover beyond these, BEFORE and BEHIND, is loaded element by element.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "common/window_size.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool INSIDE = false;  // inside: no window or run leaves the image
#endif

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
            const bool inside = INSIDE || column + first < width;
            if (inside) pack = load_pack<Element, VECTOR>(row + column + first);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) at[BEFORE + first + e] = inside ? pack.at[e] : outside;
        }
#pragma unroll
        for (int i = 0; i < BEHIND; ++i) at[BEFORE + BODY + i] = one(row, column + BODY + i, width, outside);
    }

    __device__ __forceinline__ static Element one(const Element* row, int column, int width, Element outside) {
        return INSIDE || (column >= 0 && column < width) ? row[column] : outside;
    }
};

struct RunShape {
    int channels;                            // problem.channels
    int height, width;                       // folded.height, problem.width: pixels of a plane
    int output_height, output_width;         // folded.output_height, problem.output_width
    unsigned tasks;                          // folded.tasks: threads that have outputs
    unsigned runs, run_magic, run_shift;     // folded.runs: per row of outputs, and the reciprocal of their number
    unsigned bands, band_magic, band_shift;  // folded.bands: of OUTPUT_ROWS rows of outputs per plane, likewise
};

// Outputs of a thread: a run of OUTPUT_COLUMNS in OUTPUT_ROWS rows of one plane.
struct Run {
    u32 task;
    int column, row;
    long long plane;

    __device__ __forceinline__ Run(const RunShape& shape) : task(blockIdx.x * blockDim.x + threadIdx.x) {
        const u32 above = divided(task, shape.run_magic, shape.run_shift);
        const u32 number = divided(above, shape.band_magic, shape.band_shift);
        column = (task - above * shape.runs) * OUTPUT_COLUMNS;
        row = (above - number * shape.bands) * OUTPUT_ROWS;
        plane = number;
    }

    // Stores the run to a row of y that starts at `results`, STORED elements at a time; STORED divides rows of y.
    template <class Result>
    __device__ __forceinline__ void store(Result* results, int output_width,
                                          const Result (&found)[OUTPUT_COLUMNS]) const {
#pragma unroll
        for (int first = 0; first < OUTPUT_COLUMNS; first += STORED) {
            if (!INSIDE && column + first >= output_width) return;
            Pack<Result, STORED> pack;
#pragma unroll
            for (int e = 0; e < STORED; ++e) pack.at[e] = found[first + e];
            store_pack(results + column + first, pack);
        }
    }

private:
    // n / size for n below 2^31, by the reciprocal of size; magic is 0 for a size of 1.
    __device__ __forceinline__ static u32 divided(u32 n, u32 magic, u32 shift) {
        return magic ? static_cast<u32>(1ULL * n * magic >> 32) >> shift : n;
    }
};
