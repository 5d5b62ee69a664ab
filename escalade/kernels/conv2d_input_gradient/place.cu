// y[n][i*step_h + offset_h][j*step_w + offset_w] = source[n][i + shift_h][j + shift_w], in every channel
//
// Scatters the results of one sub-pixel phase of a strided gradient into dx; a phase without taps has NO_SOURCE and is
// zero. HAS_MASK: the gradient passes where the auxiliary tensor, laid out like y, is positive; HAS_RESIDUAL: the
// auxiliary tensor is added. A source laid out like y may be y itself.
// Rows of threads take rows of pixels (in NCHW, of one channel), VECTOR elements each. Limiter: memory.
//
// Rungs: `implicit_gemm`, `tensor_core`, `tensor_core_split`, `tma_wgmma`, and for groups `depthwise`,
// `depthwise_tile`, `depthwise_mma` and `grouped`, whose kernels do not scatter; for phases without taps (NO_SOURCE)
// also `persistent`, `streamed_window` and `wgmma_split`. Read mask.cuh for the mask.
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // forward.dtype
constexpr bool NHWC = false;          // forward.layout == "nhwc"
constexpr bool HAS_MASK = true;       // problem.mask
constexpr bool HAS_RESIDUAL = false;  // forward.residual
constexpr bool NO_SOURCE = false;     // phase.taps == 0
constexpr int VECTOR = 1;             // vector
#endif

#include "conv2d_input_gradient/mask.cuh"

struct Places {  // filled by escalade/ops/conv2d_input_gradient/rungs/phases.py, in this order
    int batch, channels, rows, columns;                     // of the phase
    int step_h, step_w, offset_h, offset_w, height, width;  // their positions in y
    int shift_h, shift_w, source_height, source_width;      // and in the source
};

extern "C" __global__ void conv2d_input_gradient_place(const Element* source, const Element* aux, Element* y,
                                                       Places places) {
    wait_for_previous_launch();
    const int planes = NHWC ? 1 : places.channels;  // per image
    const int inside = NHWC ? places.channels : 1;  // contiguous elements per pixel
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= places.batch * planes * places.rows) return;
    const long long plane = row / places.rows;
    const int i = row % places.rows;
    const long long y_row = (plane * places.height + i * places.step_h + places.offset_h) * places.width;
    const long long source_row = (plane * places.source_height + i + places.shift_h) * places.source_width;

    const int packs = inside / VECTOR;  // per pixel
    for (int at = threadIdx.x; at < places.columns * packs; at += blockDim.x) {
        const int j = at / packs, c = at % packs * VECTOR;
        const long long to = (y_row + j * places.step_w + places.offset_w) * inside + c;
        Pack<Element, VECTOR> values;
        if (NO_SOURCE) {
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) values.at[e] = from_float<Element>(0.f);
        } else {
            values = load_pack<Element, VECTOR>(source + (source_row + j + places.shift_w) * inside + c);
        }
        if (HAS_RESIDUAL || (HAS_MASK && !NO_SOURCE)) {
            const Pack<Element, VECTOR> others = load_pack<Element, VECTOR>(aux + to);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float value = to_float(values.at[e]);
                values.at[e] = from_float<Element>(HAS_MASK ? masked(value, others.at[e]) : value + to_float(others.at[e]));
            }
        }
        store_pack(y + to, values);
    }
}
