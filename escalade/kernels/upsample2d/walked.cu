// y[n][oh][ow][c] = sum over r, s of weight[r] * weight[s] * x[n][row[r]][column[s]][c]                        (NHWC)
//
// A thread has VECTOR channels (16 bytes where they divide) of COLUMNS adjacent outputs, and walks down ROWS rows of
// them. It keeps the TAPS rows of x that an output row needs, already interpolated along columns, while the pixels of
// the next row are in flight: each row of x is converted and interpolated once per strip. Limiter: memory.
//
// Rung: `walked`. places.cuh has PyTorch's rules for rows, columns and weights.
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "upsample2d/places.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;       // problem.dtype
constexpr int VECTOR = 4;    // vector: channels per access
constexpr int ROWS = 16;     // config.rows: outputs per thread, down
constexpr int COLUMNS = 2;   // config.columns: outputs per thread, along
constexpr int THREADS = 128; // config.threads
#endif

using Vector = Pack<Element, VECTOR>;

// A loaded pack. The compiler would take the words of one that is used in a later iteration apart at once, and so wait
// for the load.
struct Pixel {
    Vector values;

    __device__ __forceinline__ Vector taken() const {
        if constexpr (sizeof(Vector) % sizeof(int) == 0) {
            constexpr int WORDS = sizeof(Vector) < sizeof(int) ? 1 : sizeof(Vector) / sizeof(int);
            Pack<int, WORDS> words = reinterpret_cast<const Pack<int, WORDS>&>(values);
#pragma unroll
            for (int i = 0; i < WORDS; ++i) words.at[i] = anew(words.at[i]);
            return reinterpret_cast<const Vector&>(words);
        } else {
            return values;
        }
    }
};

using Pixels = Pixel[COLUMNS][TAPS];
using Interpolated = float[COLUMNS][VECTOR];

struct Strip {
    int offsets[COLUMNS][TAPS];  // of pixels in a row of x
    float weights[COLUMNS][TAPS];

    __device__ __forceinline__ void load(Pixels& pixels, const Element* row) const {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int s = 0; s < TAPS; ++s) pixels[j][s].values = load_pack<Element, VECTOR>(row + offsets[j][s]);
    }

    __device__ __forceinline__ void interpolate(Interpolated& values, const Pixels& pixels) const {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            Vector taken[TAPS];
#pragma unroll
            for (int s = 0; s < TAPS; ++s) taken[s] = pixels[j][s].taken();
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                float along = weights[j][0] * to_float(taken[0].at[e]);
#pragma unroll
                for (int s = 1; s < TAPS; ++s) along += weights[j][s] * to_float(taken[s].at[e]);
                values[j][e] = along;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    upsample2d_walked(const Element* x, Element* y, PoolShape shape, float row_step, float column_step) {
    wait_for_previous_launch();
    const u32 vectors = shape.channels / VECTOR;
    const u32 runs = (shape.output_width + COLUMNS - 1) / COLUMNS;
    const u32 bands = (shape.output_height + ROWS - 1) / ROWS;
    u32 rest = blockIdx.x * THREADS + threadIdx.x;
    const u32 channel = rest % vectors * VECTOR;
    rest /= vectors;
    const int first_column = rest % runs * COLUMNS;
    rest /= runs;
    const int first_row = rest % bands * ROWS;
    const u32 image = rest / bands;
    if (image >= static_cast<u32>(shape.batch)) return;

    Strip strip;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const SourceTaps columns = source_taps(min(first_column + j, shape.output_width - 1), shape.width, column_step);
#pragma unroll
        for (int s = 0; s < TAPS; ++s)
            strip.offsets[j][s] = columns.at[s] * shape.x_step(), strip.weights[j][s] = columns.weight[s];
    }
    const int pitch = shape.width * shape.x_step();
    const Element* pixels = x + 1LL * image * shape.height * pitch + channel;
    Element* outputs = y +
                       ((1LL * image * shape.output_height + first_row) * shape.output_width + first_column) *
                           shape.y_step() +
                       channel;

    int top = taps_of(first_row, shape.height, row_step).first;  // row of x of rows[0]
    Interpolated rows[TAPS];
    Pixels next, first[TAPS];  // all loads before the first value is used
#pragma unroll
    for (int r = 0; r < TAPS; ++r) strip.load(first[r], pixels + clamped(top + r, shape.height) * pitch);
    strip.load(next, pixels + clamped(top + TAPS, shape.height) * pitch);
#pragma unroll
    for (int r = 0; r < TAPS; ++r) strip.interpolate(rows[r], first[r]);

    const int count = min(ROWS, shape.output_height - first_row);
#pragma unroll 1
    for (int i = 0; i < count; ++i, outputs += shape.output_width * shape.y_step()) {
        const Taps taps = taps_of(first_row + i, shape.height, row_step);
#pragma unroll 1
        while (top < taps.first) {  // x has no more rows than y: one step, or two where coordinates are rounded
            ++top;
#pragma unroll
            for (int r = 0; r + 1 < TAPS; ++r)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) rows[r][j][e] = rows[r + 1][j][e];
            strip.interpolate(rows[TAPS - 1], next);
            strip.load(next, pixels + clamped(top + TAPS, shape.height) * pitch);
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            float sums[VECTOR];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                sums[e] = taps.weight[0] * rows[0][j][e];
#pragma unroll
                for (int r = 1; r < TAPS; ++r) sums[e] += taps.weight[r] * rows[r][j][e];
            }
            Vector results;
            from_floats(results, sums);
            if (first_column + j < shape.output_width) store_pack(outputs + j * shape.y_step(), results);
        }
    }
}
