// y[n][oh][ow][c] = mean of x[n] over the window of output (oh, ow)                                           (NHWC)
//
// One CTA per output pixel and eight adjacent vectors of channels (16 bytes each, a whole line, where they divide). The
// window's pixels are distributed over SPLITS groups of eight lanes, each with several loads in flight; the four groups
// of a warp reduce by shuffles, the warps in smem. Limiter: memory, or with few images the latency of one load, one
// shuffle and one barrier.
//
// Rung: `vectorised`. linear launches it for the mean of `pool_first`. window.cuh has PyTorch's rule for windows.
#include "adaptive_avg_pool2d/window.cuh"
#include "common/quantized_input.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype
using Stored = float;              // problem.stored: elements of x
constexpr bool WHOLE_ROWS = true;  // problem.output_width == 1
constexpr int VECTOR = 4;          // vector: channels per access
constexpr int SPLITS = 16;         // config.splits: groups of lanes that share a window
#endif

constexpr int VECTOR_LANES = 8;
constexpr int THREADS = VECTOR_LANES * SPLITS;
constexpr int WARPS = THREADS / 32;
constexpr int CHANNELS = VECTOR_LANES * VECTOR;  // per CTA
constexpr int AHEAD = 8;                         // loads in flight per lane

extern "C" __global__ void __launch_bounds__(THREADS)
    adaptive_avg_pool2d_vectorised(const Stored* x, Element* y, PoolShape shape, u32 channel_blocks,
                                   const float* __restrict__ scale) {
    __shared__ float sums_of_warps[WARPS][CHANNELS];
    wait_for_previous_launch();

    const u32 first_channel = blockIdx.x % channel_blocks * CHANNELS;
    const u32 pixel = blockIdx.x / channel_blocks;  // of y
    const u32 output_width = shape.output_width, output_height = shape.output_height;
    const int output_column = pixel % output_width;
    const int output_row = pixel / output_width % output_height;
    const long long image = pixel / output_width / output_height;
    if (image >= shape.batch) return;
    const Window window = Window::of(output_row, output_column, shape);

    const u32 channel = first_channel + threadIdx.x % VECTOR_LANES * VECTOR;
    const int pixels = channel < static_cast<u32>(shape.channels) ? window.pixels() : 0;
    const Stored* corner = x + image * shape.height * shape.width * shape.x_step() +
                            (window.top * shape.width + window.left) * shape.x_step() + channel;
    float sums[VECTOR] = {};
    for (int first = threadIdx.x / VECTOR_LANES; first < pixels; first += AHEAD * SPLITS) {
        Pack<Stored, VECTOR> packs[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int at = first + i * SPLITS;
            packs[i] = {};
            if (at < pixels)
                packs[i] =
                    load_pack<Stored, VECTOR>(corner + window.offset<WHOLE_ROWS>(at, shape) * shape.x_step());
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) add_pack(sums, packs[i]);
    }

    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
#pragma unroll
        for (int distance = VECTOR_LANES; distance < 32; distance *= 2)
            sums[e] += __shfl_xor_sync(ALL_LANES, sums[e], distance);
        if (lane < VECTOR_LANES) sums_of_warps[threadIdx.x / 32][lane * VECTOR + e] = sums[e];
    }
    __syncthreads();
    for (u32 c = threadIdx.x; c < CHANNELS && first_channel + c < static_cast<u32>(shape.channels); c += THREADS) {
        float sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += sums_of_warps[warp][c];
        y[1LL * pixel * shape.y_step() + first_channel + c] = from_float<Element>(scaled<Stored>(sum / window.pixels(), scale));
    }
}
