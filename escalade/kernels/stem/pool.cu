// y[n][oh][ow][k] = max over the window of x[n][oh*stride - pad + i][ow*stride - pad + j][k]      (NHWC)
//
// VECTOR filters per thread; VECTOR divides them. Positions outside x are skipped; a NaN in the window is the result.
// Limiter: memory, x is read about once (the caches hold the overlap) and y written once.
//
// Rungs: `separate`, `tensor_core`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;     // problem.storage
using Output = float;      // problem.stored
constexpr int VECTOR = 4;  // vector
#endif

#include "common/bytes.cuh"
#include "common/elements.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void stem_pool(const Element* __restrict__ x, Output* __restrict__ y, int height, int width,
                                     int filters, int output_height, int output_width, int kernel, int stride,
                                     int padding, long long outputs) {
    wait_for_previous_launch();
    const long long at = (1LL * blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    if (at >= outputs) return;
    const long long pixel = at / filters;
    const int filter = at % filters;
    const int column = pixel % output_width;
    const int row = pixel / output_width % output_height;
    const long long n = pixel / output_width / output_height;
    const Element* image = x + n * height * width * filters + filter;

    const int top = row * stride - padding, left = column * stride - padding;
    float maxima[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) maxima[e] = -__uint_as_float(0x7F800000u);
    for (int i = max(top, 0); i < min(top + kernel, height); ++i)
        for (int j = max(left, 0); j < min(left + kernel, width); ++j) {
            const Pack<Element, VECTOR> pack = load_pack<Element, VECTOR>(image + (i * width + j) * filters);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float value = to_float(pack.at[e]);
                if (value > maxima[e] || value != value) maxima[e] = value;  // NaN sticks: nothing is greater
            }
        }
    if constexpr (sizeof(Output) == 1) {  // packs of bytes are whole words
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) y[at + e] = from_float<Output>(maxima[e]);
    } else {
        Pack<Element, VECTOR> results;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) results.at[e] = from_float<Element>(maxima[e]);
        store_pack(reinterpret_cast<Element*>(y + at), results);
    }
}
