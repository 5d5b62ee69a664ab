// y[n][oh][ow][c] = sum over r, s of x[n][oh*stride - pad + r][ow*stride - pad + s][c], divided               (NHWC)
//
// A thread takes VECTOR channels (16 bytes where they divide) of OUTPUT_ROWS x OUTPUT_COLUMNS adjacent outputs. All
// inputs of one or more rows that their windows cover are loaded at once, pixels shared by windows one time, and summed
// along the row, then down the rows, in fp32. Limiter: memory.
//
// Rung: `vectorised`. Read divisor.cuh (PyTorch's divisor).
#include "avg_pool2d/divisor.cuh"
#include "common/elements.cuh"
#include "common/loads.cuh"
#include "common/prologue.cuh"
#include "common/ptx.cuh"
#include "common/window_size.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype
constexpr int OUTPUT_ROWS = 2;     // config.rows: outputs per thread
constexpr int OUTPUT_COLUMNS = 2;  // config.columns
constexpr int VECTOR = 4;          // vector: channels per access
constexpr int THREADS = 128;       // config.threads
constexpr int BLOCKS_PER_SM = 0;   // blocks_per_sm: limits registers; 0: the compiler's choice
#endif

constexpr int ROWS = (OUTPUT_ROWS - 1) * STRIDE_H + KERNEL_H;
constexpr int COLUMNS = (OUTPUT_COLUMNS - 1) * STRIDE_W + KERNEL_W;
constexpr int TOGETHER = COLUMNS < 6 ? 12 / COLUMNS : 1;  // rows that are loaded at once
using Vector = Pack<Element, VECTOR>;

// Zeros without a load unless `inside`.
__device__ __forceinline__ Vector load_if_inside(bool inside, const Element* address) {
    if constexpr (sizeof(Vector) == 16) {
        const uint4 words = load_16_if(inside, address);
        return reinterpret_cast<const Vector&>(words);
    } else {
        return load_pack_if<Element, VECTOR>(inside, address);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    avg_pool2d_vectorised(const Element* x, Element* y, const float* gains, const float* shifts, const Element* gates,
                          PoolShape shape) {
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

    const PrologueOperands<Element, VECTOR> operands(gains, shifts, gates, channel,
                                                     1LL * image * shape.channels + channel);

    bool columns_inside[COLUMNS];
#pragma unroll
    for (int s = 0; s < COLUMNS; ++s) columns_inside[s] = left + s >= 0 && left + s < shape.width;
    float sums[OUTPUT_ROWS][OUTPUT_COLUMNS][VECTOR];
#pragma unroll
    for (int first = 0; first < ROWS; first += TOGETHER) {
        Vector seen[TOGETHER][COLUMNS];
#pragma unroll
        for (int r = first; r < min(first + TOGETHER, ROWS); ++r) {
            const Element* row = pixels + ((top + r) * shape.width + left) * shape.x_step();
            const bool row_inside = top + r >= 0 && top + r < shape.height;
#pragma unroll
            for (int s = 0; s < COLUMNS; ++s)
                seen[r - first][s] = load_if_inside(row_inside && columns_inside[s], row + s * shape.x_step());
        }
#pragma unroll
        for (int r = first; r < min(first + TOGETHER, ROWS); ++r) {
#ifdef PROLOGUE
#pragma unroll
            for (int s = 0; s < COLUMNS; ++s)
                if (top + r >= 0 && top + r < shape.height && columns_inside[s])
                    seen[r - first][s] = operands.prepared(seen[r - first][s]);
#endif
#pragma unroll
            for (int j = 0; j < OUTPUT_COLUMNS; ++j)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    float along = to_float(seen[r - first][j * STRIDE_W].at[e]);
#pragma unroll
                    for (int s = 1; s < KERNEL_W; ++s) along += to_float(seen[r - first][j * STRIDE_W + s].at[e]);
#pragma unroll
                    for (int i = 0; i < OUTPUT_ROWS; ++i) {
                        if (r == i * STRIDE_H) sums[i][j][e] = along;
                        if (r > i * STRIDE_H && r < i * STRIDE_H + KERNEL_H) sums[i][j][e] += along;
                    }
                }
        }
    }

    Element* outputs = y + 1LL * image * shape.output_height * shape.output_width * shape.y_step() + channel;
#pragma unroll
    for (int i = 0; i < OUTPUT_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j) {
            if (output_row + i >= shape.output_height || output_column + j >= shape.output_width) continue;
            const float scale = one_over_divisor(counted(top + i * STRIDE_H, KERNEL_H, shape.height, PAD_H),
                                                 counted(left + j * STRIDE_W, KERNEL_W, shape.width, PAD_W));
            Vector means;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) means.at[e] = from_float<Element>(sums[i][j][e] * scale);
            store_pack(outputs + ((output_row + i) * shape.output_width + output_column + j) * shape.y_step(), means);
        }
}
