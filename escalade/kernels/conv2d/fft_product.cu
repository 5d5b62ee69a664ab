// outputs[tile][k][f] = sum over c of inputs[tile][c][f] * conj(weights[k][c][f]), all complex
//
// In the frequency domain a convolution is one small GEMM per frequency. Adjacent lanes take adjacent frequencies, as
// the transforms write them: every access is a contiguous 256 bytes, and no transposition is needed between the stages.
// Lanes share nothing, so reuse is in registers (THREAD_TILES x THREAD_FILTERS accumulators per thread) and, between
// the warps of a CTA, in smem, which cp.async fills STAGES - 1 steps ahead.
// Limiter: FFMA for many channels, bytes of the spectra for few.
//
// Rung: `fft`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int FREQUENCIES = 144;   // tiling.frequencies
constexpr int THREAD_TILES = 8;    // config.thread_tiles: tiles per thread
constexpr int THREAD_FILTERS = 4;  // config.thread_filters: filters per thread
constexpr int TILE_WARPS = 2;      // config.tile_warps
constexpr int FILTER_WARPS = 4;    // config.filter_warps
constexpr int STAGES = 3;          // config.stages
constexpr int STEP_CHANNELS = 2;   // step_channels: channels per stage
#endif

#include "common/fft.cuh"
#include "common/ptx.cuh"

constexpr int WARPS = TILE_WARPS * FILTER_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int BLOCK_TILES = TILE_WARPS * THREAD_TILES;
constexpr int BLOCK_FILTERS = FILTER_WARPS * THREAD_FILTERS;
constexpr int ROWS = BLOCK_TILES + BLOCK_FILTERS;  // of 32 frequencies each, per channel: tiles, then filters
constexpr int STEP_NUMBERS = STEP_CHANNELS * ROWS * 32;
constexpr int PACKS = ROWS * 16;  // of 16 bytes, per channel
constexpr int THREAD_PACKS = (PACKS + THREADS - 1) / THREADS;

// Sources that one thread copies for every channel.
struct Copies {
    const float2* source[THREAD_PACKS];
    bool inside[THREAD_PACKS];
};

__device__ __forceinline__ void start_step(const Copies& copies, float2* slots, int channel, int channels) {
#pragma unroll
    for (int step_channel = 0; step_channel < STEP_CHANNELS; ++step_channel)
#pragma unroll
        for (int i = 0; i < THREAD_PACKS; ++i) {
            const int pack = i * THREADS + threadIdx.x;
            if (PACKS % THREADS != 0 && pack >= PACKS) continue;
            // Channels and frequencies past the last are zero-filled and add nothing.
            const bool inside = copies.inside[i] && channel + step_channel < channels;
            const float2* source = copies.source[i] + (inside ? (channel + step_channel) * FREQUENCIES : 0);
            copy_async_16(shared_address(slots + step_channel * ROWS * 32 + pack * 2), source, inside);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, WARPS <= 16 ? 16 / WARPS : 1)
conv2d_fft_product(const float2* __restrict__ inputs, const float2* __restrict__ weights,
                   float2* __restrict__ outputs, int tiles, int channels, int filters) {
    extern __shared__ float4 shared_memory[];
    float2* const slots = reinterpret_cast<float2*>(shared_memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile_blocks = (tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    const int filter_blocks = (filters + BLOCK_FILTERS - 1) / BLOCK_FILTERS;

    // CTAs that read the same frequencies are adjacent, so that they share them in L2.
    const int block_filter = blockIdx.x % filter_blocks * BLOCK_FILTERS;
    const int block_tile = blockIdx.x / filter_blocks % tile_blocks * BLOCK_TILES;
    const int block_frequency = blockIdx.x / filter_blocks / tile_blocks * 32;

    Copies copies;
#pragma unroll
    for (int i = 0; i < THREAD_PACKS; ++i) {
        const int pack = i * THREADS + threadIdx.x;
        const int row = pack / 16, frequency = block_frequency + pack % 16 * 2;
        // Rows past the last tile or filter repeat it; their sums are not stored.
        const float2* matrix_row =
            row < BLOCK_TILES ? inputs + min(block_tile + row, tiles - 1) * channels * FREQUENCIES
                              : weights + min(block_filter + row - BLOCK_TILES, filters - 1) * channels * FREQUENCIES;
        copies.inside[i] = frequency < FREQUENCIES;
        copies.source[i] = matrix_row + (copies.inside[i] ? frequency : 0);
    }

    const int steps = (channels + STEP_CHANNELS - 1) / STEP_CHANNELS;
    for (int step = 0; step < STAGES - 1; ++step) {
        start_step(copies, slots + step * STEP_NUMBERS, step * STEP_CHANNELS, channels);
        copy_async_commit();
    }

    float2 acc[THREAD_TILES][THREAD_FILTERS] = {};
    const int tile_row = warp % TILE_WARPS * THREAD_TILES;
    const int filter_row = BLOCK_TILES + warp / TILE_WARPS * THREAD_FILTERS;
    int stage = 0, free_stage = STAGES - 1;
    for (int step = 0; step < steps; ++step) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();  // this step has arrived, and all are done with the stage that is refilled next
        start_step(copies, slots + free_stage * STEP_NUMBERS, (step + STAGES - 1) * STEP_CHANNELS, channels);
        copy_async_commit();

#pragma unroll
        for (int step_channel = 0; step_channel < STEP_CHANNELS; ++step_channel) {
            const float2* rows = slots + stage * STEP_NUMBERS + step_channel * ROWS * 32 + lane;
            float2 weight[THREAD_FILTERS];
#pragma unroll
            for (int j = 0; j < THREAD_FILTERS; ++j) weight[j] = rows[(filter_row + j) * 32];
#pragma unroll
            for (int i = 0; i < THREAD_TILES; ++i) {
                const float2 input = rows[(tile_row + i) * 32];
#pragma unroll
                for (int j = 0; j < THREAD_FILTERS; ++j) {
                    acc[i][j].x += input.x * weight[j].x;
                    acc[i][j].y += input.y * weight[j].x;
                    acc[i][j].x += input.y * weight[j].y;
                    acc[i][j].y -= input.x * weight[j].y;
                }
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
    }

    const int frequency = block_frequency + lane;
    if (frequency >= FREQUENCIES) return;
#pragma unroll
    for (int i = 0; i < THREAD_TILES; ++i)
#pragma unroll
        for (int j = 0; j < THREAD_FILTERS; ++j) {
            const int tile = block_tile + tile_row + i, filter = block_filter + filter_row - BLOCK_TILES + j;
            if (tile < tiles && filter < filters)
                outputs[(tile * filters + filter) * FREQUENCIES + frequency] = acc[i][j];
        }
}
