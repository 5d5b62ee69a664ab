// Loads of a CTA of fused.cu into smem, in fp32: the weights once, rows for every tile.
#pragma once

#include "common/warp.cuh"
#include "mlp_backward/fused_layers.cuh"

template <int COUNT>
__device__ __forceinline__ Pack<float, COUNT> widened(const Pack<Element, COUNT>& pack) {
    Pack<float, COUNT> wide;
#pragma unroll
    for (int e = 0; e < COUNT; ++e) wide.at[e] = to_float(pack.at[e]);
    return wide;
}

template <int L, class Parameters>
__device__ __forceinline__ void load_weights(float* shared, const Parameters& parameters) {
    using Here = Of<L>;
    constexpr Layer layer = LAYERS[L];
    constexpr int features = layer.features, pitch = Here::input_pitch;
    const Element* weight = parameters[Here::weight];
    if constexpr (layer.norm) {
        const Element *scale = parameters[layer.parameter], *shift = parameters[layer.parameter + 1];
        for (int o = threadIdx.x / 32; o < layer.outputs; o += WARPS) {
            float sum = 0.f;
#pragma unroll 4
            for (int f = threadIdx.x % 32; f < features; f += 32) {
                const float w = to_float(weight[o * features + f]);
                shared[layer.weight_at + o * pitch + f] = w * to_float(scale[f]);
                sum += w * to_float(shift[f]);
            }
            sum = warp_sum(sum);
            if constexpr (layer.bias) sum += to_float(parameters[Here::weight + 1][o]);
            if (threadIdx.x % 32 == 0) shared[layer.bias_at + o] = sum;
        }
    } else {
        constexpr int VECTOR = features % 4 == 0 ? 4 : 1;
#pragma unroll 4
        for (int at = threadIdx.x * VECTOR; at < features * layer.outputs; at += THREADS * VECTOR) {
            const Pack<Element, VECTOR> pack = load_pack<Element, VECTOR>(weight + at);
            store_pack(shared + layer.weight_at + at / features * pitch + at % features, widened(pack));
        }
        if constexpr (layer.bias)
            for (int o = threadIdx.x; o < layer.outputs; o += THREADS)
                shared[layer.bias_at + o] = to_float(parameters[Here::weight + 1][o]);
    }
    if constexpr (L < LAST) load_weights<L + 1>(shared, parameters);
}

// Rows of `width` elements, stored at place(t, i), VECTOR at a time; zeros past the last row.
template <int width, int VECTOR, class Place>
__device__ __forceinline__ void load_rows(float* shared, const Element* from, int present, const Place& place) {
#pragma unroll 4
    for (int at = thread_number() * VECTOR; at < TILE_ROWS * width; at += THREADS * VECTOR) {
        const int t = at / width, i = at % width;
        Pack<Element, VECTOR> pack{};
        if (t < present) pack = load_pack<Element, VECTOR>(from + at);
        store_pack(shared + place(t, i), widened(pack));
    }
}
