// y[n][c][oh][ow] = x[n][c][oh - top][ow - left], padded according to MODE                                    (NCHW)
//
// A thread takes RUN adjacent outputs of a row and stores them at once; the inputs are unaligned and loaded one by one.
// Limiter: memory.
//
// Rung: `runs`. Read beyond.cuh (padding).
#include "common/elements.cuh"
#include "common/pool_shape.cuh"
#include "common/ptx.cuh"
#include "pad2d/beyond.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;   // problem.dtype
constexpr int MODE = 0;  // ("constant", "reflect", "replicate", "circular").index(problem.mode)
constexpr int RUN = 4;   // run: outputs per thread
#endif

extern "C" __global__ void pad2d_runs(const Element* x, Element* y, PoolShape shape, int top, int left,
                                      float value) {
    wait_for_previous_launch();
    const u32 runs = shape.output_width / RUN;
    u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
    const int first = rest % runs * RUN;
    rest /= runs;
    const int output_row = rest % static_cast<u32>(shape.output_height);
    const u32 plane = rest / static_cast<u32>(shape.output_height);
    if (plane >= static_cast<u32>(shape.batch) * shape.channels) return;

    const int row = source(output_row - top, shape.height);
    const Element* pixels = x + (1LL * plane * shape.height + row) * shape.width;
    Pack<Element, RUN> run;
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
        const int column = source(first + j - left, shape.width);
        run.at[j] = row >= 0 && column >= 0 ? pixels[column] : from_float<Element>(value);
    }
    store_pack(y + (1LL * plane * shape.output_height + output_row) * shape.output_width + first, run);
}
