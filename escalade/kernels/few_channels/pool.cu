// y[n][oh][ow][k] = max over i, j < POOL of relu(x[n][oh*POOL + i][ow*POOL + j][k]), relu optional
//
// Disjoint windows; those at the edges may be partial. VECTOR filters per thread in NHWC, where VECTOR divides their
// number; one output per thread in NCHW. A NaN in the window is the result. Limiter: memory, x is read once and y
// written once.
//
// Rungs that leave ReLU or pooling to it: `matrix_unroll`, `streams`, `tensor_cores`, `fusion`, `restrict`,
// `unrolling`, `half`, `direct` and `images_a_tile`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;           // problem.storage
constexpr bool NHWC = false;     // problem.layout == "nhwc"
constexpr int VECTOR = 1;        // vector
constexpr int POOL = 4;          // problem.pool
constexpr bool HAS_RELU = true;  // problem.relu
#endif

#include "common/epilogue.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void few_channels_pool(const Element* __restrict__ x, Element* __restrict__ y, int height,
                                             int width, int filters, int output_height, int output_width,
                                             long long outputs) {
    wait_for_previous_launch();
    const long long at = (1LL * blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    if (at >= outputs) return;
    const long long pixel = NHWC ? at / filters : at;
    const int column = pixel % output_width;
    const int row = pixel / output_width % output_height;
    const long long plane = pixel / output_width / output_height;  // an image in NHWC, one of its filters in NCHW
    const int step = NHWC ? filters : 1;
    const Element* from = x + plane * height * width * step + (NHWC ? at % filters : 0);

    float maxima[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) maxima[e] = HAS_RELU ? 0.f : -__uint_as_float(0x7F800000u);
    const int rows = min(POOL, height - row * POOL), columns = min(POOL, width - column * POOL);
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j) {
            const int inside = (row * POOL + i) * width + column * POOL + j;
            const Pack<Element, VECTOR> pack = load_pack<Element, VECTOR>(from + 1LL * inside * step);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float value = activated<false>(to_float(pack.at[e]));
                if (value > maxima[e] || value != value) maxima[e] = value;  // NaN sticks: nothing is greater
            }
        }
    Pack<Element, VECTOR> results;
    from_floats(results, maxima);
    store_pack(y + at, results);
}
