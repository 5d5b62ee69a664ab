// y[n][c][oh][ow] = sum over r, s of weight[r] * weight[s] * x[n][c][row[r]][column[s]]                       (NCHW)
//
// A thread walks down ROWS outputs of COLUMNS adjacent columns, stored at once. It keeps the TAPS rows of x that an
// output row needs, already interpolated along columns; the pixels of the next row are in flight meanwhile. Each row of x
// is so read and interpolated once per CTA. The CTA computes the rows of its outputs and their weights once, in smem.
// Limiter: memory.
//
// Where all threads read pixels in the same pattern (SPAN > 0: doubling, halving), a thread loads each pixel once;
// otherwise it loads TAPS pixels per output, from L1.
//
// Rung: `runs`. Read common/strips.cuh (outputs of a thread). places.cuh has PyTorch's rules for rows, columns and weights.
#include "common/elements.cuh"
#include "common/strips.cuh"
#include "upsample2d/places.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;       // problem.dtype
constexpr int ROWS = 16;     // config.rows: outputs per thread
constexpr int COLUMNS = 4;   // config.columns
constexpr int SPAN = 0;      // pattern.span: adjacent pixels that the columns of a thread are made of; 0: any pixels
#define OFFSETS 0, 0, 0, 0  // pattern.offsets: the first tap of each column, relative to that of the first
#endif

constexpr int LOADS = SPAN ? SPAN : COLUMNS * TAPS;  // per row of x

// The columns of a thread.
struct Columns {
    const int width;
    int at[SPAN ? 1 : LOADS];  // with SPAN the first pixel, which may be outside of the image
    bool is_inside = false;    // with SPAN: all of them are in the image
    float weight[COLUMNS][TAPS];

    __device__ __forceinline__ Columns(int first_column, int width, float step) : width(width) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const Taps taps = taps_of(first_column + j, width, step);
#pragma unroll
            for (int s = 0; s < TAPS; ++s) {
                weight[j][s] = taps.weight[s];
                if (!SPAN) at[SPAN ? 0 : j * TAPS + s] = taps.at(s, width);
            }
            if (SPAN && j == 0) at[0] = taps.first, is_inside = taps.first >= 0 && taps.first + SPAN <= width;
        }
    }

    __device__ __forceinline__ void load(Element (&pixels)[LOADS], const Element* row) const {
        if (SPAN && is_inside) {
            row += at[0];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) pixels[i] = row[i];
        } else {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) pixels[i] = row[SPAN ? clamped(at[0] + i, width) : at[SPAN ? 0 : i]];
        }
    }

    // The pixels of a row, interpolated along columns.
    __device__ __forceinline__ void interpolate(float (&values)[COLUMNS], const Element (&pixels)[LOADS]) const {
        constexpr int offsets[COLUMNS] = {OFFSETS};
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int first = SPAN ? offsets[j] : j * TAPS;
            float along = 0.f;
#pragma unroll
            for (int s = 0; s < TAPS; ++s) along += weight[j][s] * to_float(pixels[first + s]);
            values[j] = along;
        }
    }
};

extern "C" __global__ void upsample2d_runs(const Element* x, Element* y, PoolShape shape, float row_step,
                                           float column_step, StripShape strips) {
    __shared__ Taps taps[ROWS];
    const Strip<ROWS, COLUMNS> strip(shape, strips);
    for (int i = threadIdx.x; i < strip.rows; i += blockDim.x)
        taps[i] = taps_of(strip.first_row + i, shape.height, row_step);
    __syncthreads();
    wait_for_previous_launch();
    if (!strip.there) return;

    const Columns columns(strip.first_column, shape.width, column_step);
    const Element* const image = x + 1LL * strip.plane * shape.height * shape.width;
    Element* to = y + strip.output(shape);
    const int end = taps[strip.rows - 1].first + TAPS;
    int next = taps[0].first;  // row of x whose pixels are loaded
    Element pixels[LOADS];
    float window[TAPS][COLUMNS];
    columns.load(pixels, image + 1LL * clamped(next, shape.height) * shape.width);
#pragma unroll 1
    for (int i = 0; i < strip.rows; ++i, to += shape.output_width) {
        const int first = taps[i].first;
        if (next < first) {  // smaller results skip rows
            next = first;
            columns.load(pixels, image + 1LL * clamped(next, shape.height) * shape.width);
        }
#pragma unroll 1
        for (; next < first + TAPS;) {
#pragma unroll
            for (int r = 0; r + 1 < TAPS; ++r)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) window[r][j] = window[r + 1][j];
            columns.interpolate(window[TAPS - 1], pixels);
            if (++next < end) columns.load(pixels, image + 1LL * clamped(next, shape.height) * shape.width);
        }
        Pack<Element, COLUMNS> results;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            float sum = 0.f;
#pragma unroll
            for (int r = 0; r < TAPS; ++r) sum += taps[i].weight[r] * window[r][j];
            results.at[j] = from_float<Element>(sum);
        }
        store_pack(to, results);
    }
}
