// target[row][c] = source[row][c] converted for c < channels, 0 for channels <= c < target_channels
//
// Makes rows (pixels of x or taps of the weights, NHWC) fit for 8- and 16-byte copies: converts the element type, pads
// channels with zeros, and with ROUNDED multiplies by FACTOR and rounds to TF32. Four target channels per thread.
// Limiter: memory.
//
// Rungs: `tensor_core`, `half_storage`, `fused_epilogue`, `tensor_core_split`, `tma_wgmma`, `producer_consumer`,
// `persistent`, `overlapped_store`, `swapped_operands`, `cluster_multicast`, `cluster_split_k`, `streamed_window`,
// `narrow` and `wgmma_split`, where their operands need it; conv2d_input_gradient and linear through those.
#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Source = float;                     // conversion.element
using Target = float;                     // conversion.target
constexpr bool CHANNELS_ALIGNED = false;  // conversion.channels % 4 == 0 and conversion.channels == conversion.target_channels
constexpr bool ROUNDED = false;           // conversion.rounded: round to TF32
constexpr float FACTOR = 1.0f;            // conversion.factor
#endif

__device__ __forceinline__ Target converted(Source value) {
    const float wide = to_float(value);
    return from_float<Target>(ROUNDED ? __uint_as_float(to_tf32(wide * FACTOR)) : wide);
}

extern "C" __global__ void conv2d_convert(const Source* __restrict__ source, Target* __restrict__ target,
                                          long long rows, int channels, int target_channels) {
    wait_for_previous_launch();
    const int packs = target_channels / 4;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = at / packs;
    const int channel = static_cast<int>(at - row * packs) * 4;
    if (row >= rows) return;

    Pack<Target, 4> pack;
    const Source* first = source + row * channels + channel;
    if (CHANNELS_ALIGNED) {  // then there is no padding
        const Pack<Source, 4> read = load_pack<Source, 4>(first);
#pragma unroll
        for (int e = 0; e < 4; ++e) pack.at[e] = converted(read.at[e]);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) pack.at[e] = channel + e < channels ? converted(first[e]) : from_float<Target>(0.f);
    }
    store_pack(target + at * 4, pack);
}
