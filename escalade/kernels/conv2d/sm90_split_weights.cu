// packed[filter][k_tile] = the upper halves of 32 weights, then their lower halves (common/halves.cuh)
//
// A k-tile is 32 channels of one filter tap, zero-padded; the shortcut's weights are last. The weights of a filter are
// first multiplied by the power of two that brings their max magnitude into [2^14, 2^15); `scales` holds two factors
// per filter that undo it. Every 16 channels are permuted to the order in which four lanes with four adjacent channels
// each hold them as MMA rows: 0 1 4 5 8 9 12 13, then 2 3 6 7 10 11 14 15.
// One CTA per filter. Limiter: memory, once per network.
//
// Rung: `wgmma_split`, also of conv2d_input_gradient.
#include "common/halves.cuh"
#include "common/warp.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int THREADS = 256;  // threads
#endif

constexpr int K_TILE = 32;
constexpr int PAIRS = K_TILE / 2;

__device__ __forceinline__ u32 largest_key(const float* __restrict__ weights, int count) {
    u32 largest = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) largest = max(largest, magnitude_key(weights[i]));
    return largest;
}

// Scales and packs pair `pair` of a tap's channels.
__device__ __forceinline__ void pack(const float* __restrict__ tap, int channels, int k_tile, int pair, float scale,
                                     u32* __restrict__ row) {
    const int channel = k_tile * K_TILE + pair / 8 * 16 + pair % 4 * 4 + pair % 8 / 4 * 2;
    const float first = channel < channels ? tap[channel] * scale : 0.f;
    const float second = channel + 1 < channels ? tap[channel + 1] * scale : 0.f;
    const Halves halves = split(first, second);
    row[pair] = halves.upper;
    row[PAIRS + pair] = halves.lower;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_sm90_split_weights(const float* __restrict__ weight, const float* __restrict__ shortcut_weight,
                              u32* __restrict__ packed, float2* __restrict__ scales, int channels, int taps,
                              int shortcut_channels) {
    __shared__ u32 largest_of_warps[THREADS / 32];
    wait_for_previous_launch();
    const int filter = blockIdx.x;
    const float* of_filter = weight + 1LL * filter * taps * channels;
    const float* of_shortcut = shortcut_weight + 1LL * filter * shortcut_channels;
    const u32 seen = max(largest_key(of_filter, taps * channels), largest_key(of_shortcut, shortcut_channels));
    const u32 mine = warp_max(seen);
    if (threadIdx.x % 32 == 0) largest_of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
    u32 largest = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) largest = max(largest, largest_of_warps[warp]);
    const int exponent = scaling_exponent(magnitude_bits(largest));
    const float scale = power_of_two(exponent);
    if (threadIdx.x == 0) scales[filter] = undoing_factors(exponent);
    // Scales are read in pairs, so an odd last filter needs a second one.
    if (threadIdx.x == 1 && filter + 1 == gridDim.x && gridDim.x % 2) scales[filter + 1] = make_float2(0.f, 0.f);

    const int tap_k_tiles = (channels + K_TILE - 1) / K_TILE, image_k_tiles = taps * tap_k_tiles;
    const int k_tiles = image_k_tiles + (shortcut_channels + K_TILE - 1) / K_TILE;
    u32* rows = packed + 1LL * filter * k_tiles * K_TILE;
    for (int i = threadIdx.x; i < k_tiles * PAIRS; i += THREADS) {
        const int k_tile = i / PAIRS;
        u32* row = rows + 1LL * k_tile * K_TILE;
        if (k_tile < image_k_tiles)
            pack(of_filter + k_tile / tap_k_tiles * channels, channels, k_tile % tap_k_tiles, i % PAIRS, scale, row);
        else pack(of_shortcut, shortcut_channels, k_tile - image_k_tiles, i % PAIRS, scale, row);
    }
}
