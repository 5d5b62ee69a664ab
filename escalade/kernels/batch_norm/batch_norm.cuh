// What the kernels of batch_norm share: which channel an element belongs to, and what becomes of it.
#pragma once

#include "common/epilogue.cuh"

// The channel of the element `at`, counted in memory's order.
__device__ __forceinline__ int channel_of(Index at, int channels, int plane) {
    return static_cast<int>(NHWC ? at % channels : at / plane % channels);
}

// VECTOR channels' worth of one of their numbers. Four at most move as one: nobody promises more than 16-byte alignment.
template <int VECTOR>
__device__ __forceinline__ void load_channels(const float* from, float (&values)[VECTOR]) {
    constexpr int TOGETHER = VECTOR < 4 ? VECTOR : 4;
#pragma unroll
    for (int e = 0; e < VECTOR; e += TOGETHER) {
        const Pack<float, TOGETHER> pack = load_pack<float, TOGETHER>(from + e);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) values[e + i] = pack.at[i];
    }
}

// The mean is subtracted first. x * scale + (bias - mean * scale) would be one operation less, and loses the digits of
// y where the mean is much larger than the deviation.
__device__ __forceinline__ Element normalised(Element x, float mean, float scale, float bias, Element residual) {
    float value = (to_float(x) - mean) * scale + bias;
    return from_float<Element>(
        activated<HAS_RESIDUAL, HAS_RELU>(value, HAS_RESIDUAL ? to_float(residual) : 0.f));
}
