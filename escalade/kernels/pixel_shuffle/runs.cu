// large[n][c][h*FACTOR + i][w*FACTOR + j] = small[n][(c*FACTOR + i)*FACTOR + j][h][w]; with DOWN the inverse   (NCHW)
//
// A thread takes RUN adjacent pixels of a row of the large image in one access; in the small image they are in FACTOR
// planes. Limiter: memory.
//
// Rung: `runs`. Read shuffle.cuh (sizes).
#include "pixel_shuffle/shuffle.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
constexpr int RUN = 4;  // run: elements of the large image per thread
#endif

extern "C" __global__ void pixel_shuffle_runs(const Element* x, Element* y, Shuffle shape) {
    wait_for_previous_launch();
    const u32 height = shape.height * FACTOR, width = shape.width * FACTOR;
    u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 first = rest % (width / RUN) * RUN;
    rest /= width / RUN;
    const u32 row = rest % height;
    const u32 plane = rest / height;  // of the large image
    if (plane >= static_cast<u32>(shape.batch) * shape.channels) return;

    const long long large = (1LL * plane * height + row) * width + first;
    const long long small =
        ((1LL * plane * BLOCK + row % FACTOR * FACTOR) * shape.height + row / FACTOR) * shape.width;
    const long long pixels = 1LL * shape.height * shape.width;
    Pack<Element, RUN> run;
    if constexpr (DOWN) run = load_pack<Element, RUN>(x + large);
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
        const long long at = small + (first + j) % FACTOR * pixels + (first + j) / FACTOR;
        if constexpr (DOWN) y[at] = run.at[j];
        else run.at[j] = x[at];
    }
    if constexpr (!DOWN) store_pack(y + large, run);
}
