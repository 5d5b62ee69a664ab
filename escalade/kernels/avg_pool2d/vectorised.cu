// y[n][oh][ow][c] = sum over r, s of x[n][oh*stride - pad + r][ow*stride - pad + s][c], divided               (NHWC)
//
// A thread takes VECTOR channels (16 bytes where they divide) of OUTPUT_ROWS x OUTPUT_COLUMNS adjacent outputs. For
// each row that their windows cover, all inputs are loaded at once, pixels shared by windows one time, and summed along
// the row, then down the rows, in fp32. Limiter: memory.
//
// Rung: `vectorised`. Read divisor.cuh (PyTorch's divisor).
#include "avg_pool2d/divisor.cuh"
#include "common/elements.cuh"
#include "common/prologue.cuh"
#include "common/ptx.cuh"
#include "common/window_size.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype
constexpr int OUTPUT_ROWS = 2;     // config.rows: outputs per thread
constexpr int OUTPUT_COLUMNS = 2;  // config.columns
constexpr int VECTOR = 4;          // vector: channels per access
#endif

constexpr int ROWS = (OUTPUT_ROWS - 1) * STRIDE_H + KERNEL_H;
constexpr int COLUMNS = (OUTPUT_COLUMNS - 1) * STRIDE_W + KERNEL_W;
using Vector = Pack<Element, VECTOR>;

extern "C" __global__ void avg_pool2d_vectorised(const Element* x, Element* y, const float* gains, const float* shifts,
                                                 const Element* gates, PoolShape shape) {
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

    float sums[OUTPUT_ROWS][OUTPUT_COLUMNS][VECTOR] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const bool inside = top + r >= 0 && top + r < shape.height;
        Vector seen[COLUMNS];
#pragma unroll
        for (int s = 0; s < COLUMNS; ++s) {
            seen[s] = {};
            if (inside && left + s >= 0 && left + s < shape.width)
                seen[s] = operands.prepared(
                    load_pack<Element, VECTOR>(pixels + ((top + r) * shape.width + left + s) * shape.x_step()));
        }
#pragma unroll
        for (int j = 0; j < OUTPUT_COLUMNS; ++j)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                float along = 0.f;
#pragma unroll
                for (int s = 0; s < KERNEL_W; ++s) along += to_float(seen[j * STRIDE_W + s].at[e]);
#pragma unroll
                for (int i = 0; i < OUTPUT_ROWS; ++i)
                    if (r >= i * STRIDE_H && r < i * STRIDE_H + KERNEL_H) sums[i][j][e] += along;
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
