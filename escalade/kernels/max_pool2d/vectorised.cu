// y[n][oh][ow][c] = max over r, s of x[n][oh*stride - pad + r][ow*stride - pad + s][c]                        (NHWC)
//
// A thread takes VECTOR channels (16 bytes where they divide) of OUTPUT_ROWS x OUTPUT_COLUMNS adjacent outputs. For
// each row that their windows cover, all inputs are loaded at once, pixels shared by windows one time, and reduced
// along the row, then down the rows; with PLACES pixel by pixel, and the argmax is stored too, one byte each. Limiter:
// memory.
//
// Rung: `vectorised`. Read largest.cuh (max, two elements at once in 16 bits), common/largest_pair.cuh (with argmax,
// which starts at the first tap inside the image: largest_place.cuh).
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;               // problem.dtype
constexpr bool PLACES = false;       // problem.places: also store the place of each maximum
constexpr bool BEHIND_RELU = false;  // problem.behind_relu
constexpr int OUTPUT_ROWS = 2;       // config.rows: outputs per thread
constexpr int OUTPUT_COLUMNS = 2;    // config.columns
constexpr int VECTOR = 4;            // vector: channels per access
constexpr int THREADS = 128;         // config.threads
constexpr int BLOCKS_PER_SM = 0;     // blocks_per_sm: limits registers; 0: the compiler's choice
#endif

#include "common/pool_shape.cuh"
#include "common/window_size.cuh"
#include "max_pool2d/largest.cuh"
#include "max_pool2d/largest_place.cuh"

constexpr int ROWS = (OUTPUT_ROWS - 1) * STRIDE_H + KERNEL_H;
constexpr int COLUMNS = (OUTPUT_COLUMNS - 1) * STRIDE_W + KERNEL_W;
using Vector = Values<VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    max_pool2d_vectorised(const Element* x, Element* y, unsigned char* indices, PoolShape shape) {
    wait_for_previous_launch();
    const u32 vectors = shape.channels / VECTOR;
    const u32 runs = (shape.output_width + OUTPUT_COLUMNS - 1) / OUTPUT_COLUMNS;
    const u32 bands = (shape.output_height + OUTPUT_ROWS - 1) / OUTPUT_ROWS;
    u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 channel = rest % vectors * VECTOR;
    rest /= vectors;
    const int output_column = rest % runs * OUTPUT_COLUMNS;
    rest /= runs;
    const int output_row = rest % bands * OUTPUT_ROWS;
    const u32 image = rest / bands;
    if (image >= static_cast<u32>(shape.batch)) return;

    const int top = output_row * STRIDE_H - PAD_H;
    const int left = output_column * STRIDE_W - PAD_W;
    const Element* pixels = x + 1LL * image * shape.height * shape.width * shape.x_step() + channel;
    int offsets[COLUMNS];
#pragma unroll
    for (int s = 0; s < COLUMNS; ++s) offsets[s] = nearest_inside(left + s, shape.width) * shape.x_step();

    Element* outputs = y + 1LL * image * shape.output_height * shape.output_width * shape.y_step() + channel;
    if constexpr (PLACES) {
        unsigned char* from =
            indices + 1LL * image * shape.output_height * shape.output_width * shape.channels + channel;
        PlacedMaxima<Element, VECTOR> largest[OUTPUT_ROWS][OUTPUT_COLUMNS];
        Pack<Element, VECTOR> least;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) least.at[e] = from_float<Element>(__int_as_float(0xFF800000));  // -inf
#pragma unroll
        for (int i = 0; i < OUTPUT_ROWS; ++i)
#pragma unroll
            for (int j = 0; j < OUTPUT_COLUMNS; ++j)
                largest[i][j].begin(least, first_inside(top + i * STRIDE_H, 1) * KERNEL_W +
                                               first_inside(left + j * STRIDE_W, 1));
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const Element* row = pixels + nearest_inside(top + r, shape.height) * shape.width * shape.x_step();
            Pack<Element, VECTOR> seen[COLUMNS];
#pragma unroll
            for (int s = 0; s < COLUMNS; ++s) seen[s] = load_pack<Element, VECTOR>(row + offsets[s]);
            if (top + r < 0 || top + r >= shape.height) continue;
#pragma unroll
            for (int i = 0; i < OUTPUT_ROWS; ++i)
#pragma unroll
                for (int j = 0; j < OUTPUT_COLUMNS; ++j)
#pragma unroll
                    for (int s = 0; s < KERNEL_W; ++s) {
                        const int down = r - i * STRIDE_H, column = left + j * STRIDE_W + s;
                        if (down < 0 || down >= KERNEL_H || column < 0 || column >= shape.width) continue;
                        largest[i][j].update(seen[j * STRIDE_W + s], down * KERNEL_W + s);
                    }
        }
#pragma unroll
        for (int i = 0; i < OUTPUT_ROWS; ++i)
#pragma unroll
            for (int j = 0; j < OUTPUT_COLUMNS; ++j)
                if (output_row + i < shape.output_height && output_column + j < shape.output_width) {
                    const int output = (output_row + i) * shape.output_width + output_column + j;
                    largest[i][j].store(outputs + output * shape.y_step());
                    largest[i][j].store_indices<BEHIND_RELU>(from + output * shape.channels);
                }
        return;
    }

    Vector largest[OUTPUT_ROWS][OUTPUT_COLUMNS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const Element* row = pixels + nearest_inside(top + r, shape.height) * shape.width * shape.x_step();
        Vector seen[COLUMNS];
#pragma unroll
        for (int s = 0; s < COLUMNS; ++s) seen[s] = Vector::load(row + offsets[s]);
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j) {
            Vector along = seen[j * STRIDE_W];
#pragma unroll
            for (int s = 1; s < KERNEL_W; ++s) along.raise(seen[j * STRIDE_W + s]);
#pragma unroll
            for (int i = 0; i < OUTPUT_ROWS; ++i) {
                if (r == i * STRIDE_H) largest[i][j] = along;
                if (r > i * STRIDE_H && r < i * STRIDE_H + KERNEL_H) largest[i][j].raise(along);
            }
        }
    }

#pragma unroll
    for (int i = 0; i < OUTPUT_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j)
            if (output_row + i < shape.output_height && output_column + j < shape.output_width)
                largest[i][j].store(outputs +
                                    ((output_row + i) * shape.output_width + output_column + j) * shape.y_step());
}
