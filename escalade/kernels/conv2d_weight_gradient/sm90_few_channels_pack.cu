// packed[n][i][j][g][c] = x[n][ROW_STEP * i + g - pad_h][j - pad_w][c], in NHWC; zero outside the image and for c >=
// CHANNELS
//
// Packs an image of few channels for TMA: a 16-byte pixel has GROUP rows of x, each with 8 / GROUP channel slots, so
// that 128 contiguous bytes are GROUP rows of 8 taps. A thread takes ROUNDS pixels, all loads before all stores.
// Limiter: memory.
//
// Rung: `few_channels`.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = __half;       // forward.dtype
constexpr int CHANNELS = 8;   // forward.channels
constexpr int GROUP = 1;      // packing.group
constexpr int ROW_STEP = 1;   // packing.row_step
constexpr int THREADS = 256;  // threads
constexpr int ROUNDS = 4;     // rounds
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

constexpr int SLOTS = 8 / GROUP;  // channels per row
static_assert(CHANNELS <= SLOTS, "channels fit the slots");

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_weight_gradient_sm90_few_channels_pack(const Element* x, Element* packed, ConvShape shape, int rows, int columns) {
    wait_for_previous_launch();
    const u32 image_pixels = rows * columns, pixels = shape.batch * image_pixels;
    const u32 first = blockIdx.x * (ROUNDS * THREADS) + threadIdx.x;
    Pack<Element, 8> packs[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const u32 at = min(first + round * THREADS, pixels - 1), n = at / image_pixels, within = at % image_pixels;
        const int row = static_cast<int>(within / columns) * ROW_STEP - shape.pad_h;
        const int column = static_cast<int>(within % columns) - shape.pad_w;
        const Element* image = x + 1LL * n * shape.height * shape.width * CHANNELS;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const bool inside = 0 <= row + g && row + g < shape.height && 0 <= column && column < shape.width;
            const Element* from = image + (1LL * (row + g) * shape.width + column) * CHANNELS;
#pragma unroll
            for (int c = 0; c < SLOTS; ++c)
                packs[round].at[g * SLOTS + c] = c < CHANNELS && inside ? from[c] : from_float<Element>(0.f);
        }
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round)
        if (const u32 at = first + round * THREADS; at < pixels) store_pack(packed + 8LL * at, packs[round]);
}
