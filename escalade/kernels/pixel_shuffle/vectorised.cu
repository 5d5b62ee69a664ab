// large[n][h*FACTOR + i][w*FACTOR + j][c] = small[n][h][w][(c*FACTOR + i)*FACTOR + j]; with DOWN the inverse   (NHWC)
//
// A thread takes VECTOR channels of the FACTOR x FACTOR pixels that are one pixel of the small image. There they are
// contiguous, WIDE elements per access; in the large image each pixel's VECTOR channels are, 16 bytes where they
// divide. They are permuted in registers. Limiter: memory.
//
// Rung: `vectorised`. Read shuffle.cuh (sizes).
#include "pixel_shuffle/shuffle.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;     // problem.dtype
constexpr int VECTOR = 4;  // vector: channels of the large image per thread
constexpr int WIDE = 4;    // wide: channels of the small image per access
#endif

constexpr int ELEMENTS = VECTOR * BLOCK;

extern "C" __global__ void pixel_shuffle_vectorised(const Element* x, Element* y, Shuffle shape) {
    wait_for_previous_launch();
    const u32 vectors = shape.channels / VECTOR;
    u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
    const int channel = rest % vectors * VECTOR;
    rest /= vectors;
    const int w = rest % static_cast<u32>(shape.width);
    rest /= static_cast<u32>(shape.width);
    const int h = rest % static_cast<u32>(shape.height);
    const long long image = rest / static_cast<u32>(shape.height);
    if (image >= shape.batch) return;

    const long long small = ((image * shape.height + h) * shape.width + w) * shape.small_step + channel * BLOCK;
    const int width = shape.width * FACTOR;
    const long long large =
        ((image * shape.height + h) * FACTOR * width + w * FACTOR) * shape.large_step + channel;
    Element sorted[ELEMENTS];  // in the order of the small image
    if constexpr (!DOWN) {
#pragma unroll
        for (int at = 0; at < ELEMENTS; at += WIDE) {
            const Pack<Element, WIDE> pack = load_pack<Element, WIDE>(x + small + at);
#pragma unroll
            for (int e = 0; e < WIDE; ++e) sorted[at + e] = pack.at[e];
        }
    }
#pragma unroll
    for (int pixel = 0; pixel < BLOCK; ++pixel) {
        const long long at = large + (1LL * (pixel / FACTOR) * width + pixel % FACTOR) * shape.large_step;
        Pack<Element, VECTOR> pack;
        if constexpr (DOWN) pack = load_pack<Element, VECTOR>(x + at);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            if constexpr (DOWN) sorted[e * BLOCK + pixel] = pack.at[e];
            else pack.at[e] = sorted[e * BLOCK + pixel];
        }
        if constexpr (!DOWN) store_pack(y + at, pack);
    }
    if constexpr (DOWN) {
#pragma unroll
        for (int at = 0; at < ELEMENTS; at += WIDE) {
            Pack<Element, WIDE> pack;
#pragma unroll
            for (int e = 0; e < WIDE; ++e) pack.at[e] = sorted[at + e];
            store_pack(y + small + at, pack);
        }
    }
}
