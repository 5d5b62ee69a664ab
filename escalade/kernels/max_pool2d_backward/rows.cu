// dx[n][c][h][w] = dy[n][c][oh][ow] where x[n][c][h][w] is the largest of its one window, else 0               (NCHW)
//
// For windows side by side, without padding: a thread takes VECTOR columns (16 bytes) of the STRIDE_H rows of a row of
// windows, and has the places of their maxima as vectorised.cu has them: stored (STORED), or found in x. No pixel has
// two windows, so nothing is added up. What bounds it: memory.
//
// Serves `rows`. max_pool2d/largest_place.cuh has PyTorch's rule for the place of a maximum.
#include "common/pool_shape.cuh"
#include "common/ptx.cuh"
#include "max_pool2d/largest_place.cuh"

constexpr int OUTPUTS = VECTOR / STRIDE_W;

using Vector = Pack<Element, VECTOR>;
using Places = Pack<unsigned char, OUTPUTS>;

__device__ __forceinline__ Places find(const Element* rows, int width) {
    Largest largest[OUTPUTS];
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) largest[o] = {__int_as_float(0xFF800000), 0};  // -inf
#pragma unroll
    for (int r = 0; r < KERNEL_H; ++r) {
        const Vector seen = load_pack<Element, VECTOR>(rows + r * width);
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o)
#pragma unroll
            for (int s = 0; s < KERNEL_W; ++s)
                largest[o].meet(to_float(seen.at[o * STRIDE_W + s]), r * KERNEL_W + s);
    }
    Places places;
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) places.at[o] = stored_place<MASK>(largest[o]);
    return places;
}

extern "C" __global__ void max_pool2d_backward_rows(const Element* gradient, const Element* x,
                                                    const unsigned char* stored, Element* dx, PoolShape shape) {
    wait_for_previous_launch();
    const u32 vectors = shape.width / VECTOR;
    const u32 bands = (shape.height + STRIDE_H - 1) / STRIDE_H;
    u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
    const int vector = rest % vectors;
    rest /= vectors;
    const int output_row = rest % bands;
    const u32 plane = rest / bands;
    if (plane >= static_cast<u32>(shape.batch) * shape.channels) return;

    const long long pixels =
        (1LL * plane * shape.height + output_row * STRIDE_H) * shape.width + vector * VECTOR;
    Pack<Element, OUTPUTS> gradients = {};
    Places places;
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) places.at[o] = NOWHERE;
    if (output_row < shape.output_height) {  // below the last row of windows there may be a few rows without any
        const long long output =
            (1LL * plane * shape.output_height + output_row) * shape.output_width + vector * OUTPUTS;
        gradients = load_pack<Element, OUTPUTS>(gradient + output);
        places = STORED ? load_pack<unsigned char, OUTPUTS>(stored + output) : find(x + pixels, shape.width);
    }
#pragma unroll
    for (int r = 0; r < STRIDE_H; ++r) {
        Vector result;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const int s = e % STRIDE_W, o = e / STRIDE_W;
            const bool mine = r < KERNEL_H && s < KERNEL_W && places.at[o] == r * KERNEL_W + s;
            result.at[e] = mine ? gradients.at[o] : from_float<Element>(0.f);
        }
        if (output_row * STRIDE_H + r < shape.height) store_pack(dx + pixels + r * shape.width, result);
    }
}
