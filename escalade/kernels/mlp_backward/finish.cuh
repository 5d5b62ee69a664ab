// End of a CTA: turns its sums into the gradients of norms, weights and biases. The includer has the layers: LAYERS, LAST,
// Of, THREADS and WARPS.
#pragma once

#include "common/elements.cuh"

// Gradients of a layer with a norm: one lane per feature, one warp per WARPS-th output. The weights in smem are no
// longer needed: the warps' sums over outputs are exchanged there.
template <int L, class Parameters>
__device__ __forceinline__ void finish_norms(float* shared, float* slot, const Parameters& parameters) {
    constexpr Layer layer = LAYERS[L];
    if constexpr (layer.norm) {
        const Element* scale = static_cast<const Element*>(parameters[layer.parameter]);
        const Element* shift = static_cast<const Element*>(parameters[layer.parameter + 1]);
        const Element* weight = static_cast<const Element*>(parameters[Of<L>::weight]);
        constexpr int features = layer.features, pitch = Of<L>::input_pitch;
        const int warp = threadIdx.x / 32;
        for (int f = threadIdx.x % 32; f < features; f += 32) {
            const float v = to_float(scale[f]), u = to_float(shift[f]);
            float along = 0.f, sum = 0.f;
#pragma unroll 4
            for (int o = warp; o < layer.outputs; o += WARPS) {
                float& gradient = slot[Of<L>::weight_result + o * features + f];
                const float h = gradient, w = to_float(weight[o * features + f]), s = shared[layer.sums_at + o];
                along += w * h;
                sum += w * s;
                gradient = h * v + s * u;
            }
            float* exchange = shared + layer.weight_at + warp * pitch + f;
            exchange[0] = along, exchange[WARPS * pitch] = sum;
        }
    }
    if constexpr (L < LAST) finish_norms<L + 1>(shared, slot, parameters);
}

template <int L>
__device__ __forceinline__ void finish_vectors(const float* shared, float* slot) {
    constexpr Layer layer = LAYERS[L];
    if constexpr (layer.norm) {
        constexpr int pitch = Of<L>::input_pitch;
        for (int at = threadIdx.x; at < 2 * layer.features; at += THREADS) {
            const float* exchange =
                shared + layer.weight_at + at / layer.features * WARPS * pitch + at % layer.features;
            float sum = 0.f;
            for (int warp = 0; warp < WARPS; ++warp) sum += exchange[warp * pitch];
            slot[layer.result + at] = sum;
        }
    }
    if constexpr (layer.bias)
        for (int o = threadIdx.x; o < layer.outputs; o += THREADS)
            slot[Of<L>::bias_result + o] = shared[layer.sums_at + o];
    if constexpr (L < LAST) finish_vectors<L + 1>(shared, slot);
}
