// Sums of a CTA of fused.cu over its rows: H = G^T N of every layer in registers, moved to the CTA's part and back, and
// the sums of G in smem.
#pragma once

#include "mlp_backward/fused_layers.cuh"

// A warp's share of a layer's weights; a lane has four adjacent features and outputs in each half of it.
template <int L>
struct Share {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int warp_features = layer.wide ? 64 : 32, warp_outputs = layer.wide ? 32 : 64;
    static constexpr int across = (layer.features + warp_features - 1) / warp_features;
    static constexpr int down = (layer.outputs + warp_outputs - 1) / warp_outputs;
    static constexpr int lanes_across = warp_features / 8, lanes_down = warp_outputs / 8;
    int tile;

    __device__ __forceinline__ explicit Share(int warp) : tile(warp - layer.first_warp) {}
    __device__ __forceinline__ bool any() const { return tile >= 0 && tile < across * down; }
    // Compile-time constants if shares end with the weights.
    static __device__ __forceinline__ bool has_feature(int f) {
        return layer.features % warp_features == 0 || f < layer.features;
    }
    static __device__ __forceinline__ bool has_output(int o) {
        return layer.outputs % warp_outputs == 0 || o < layer.outputs;
    }
    __device__ __forceinline__ int lane_down() const { return thread_number() % 32 / lanes_across; }
    __device__ __forceinline__ int feature(int half) const {
        return tile % across * warp_features + half * warp_features / 2 + thread_number() % lanes_across * 4;
    }
    __device__ __forceinline__ int output(int half) const {
        return tile / across * warp_outputs + half * warp_outputs / 2 + lane_down() * 4;
    }
};

struct Operands {
    int input[2], gradient[2];  // smem offsets of the first row
    int input_pitch, gradient_pitch, groups;
};

template <int L>
__device__ __forceinline__ void find_operands(Operands& operands, int warp) {
    const Share<L> share(warp);
    if (share.any()) {
        constexpr Layer layer = LAYERS[L];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int f = share.feature(half), o = share.output(half);
            // Out-of-range elements are multiplied too, with some valid operand, and never stored.
            operands.input[half] = layer.input_at + (share.has_feature(f) ? f : 0);
            operands.gradient[half] = layer.gradient_at + (share.has_output(o) ? o : 0);
        }
        operands.input_pitch = Of<L>::input_pitch, operands.gradient_pitch = Of<L>::gradient_pitch;
        operands.groups = layer.groups;
    }
    if constexpr (L < LAST) find_operands<L + 1>(operands, warp);
}

__device__ __forceinline__ void add_weight_gradient(float (&sums)[8][8], const float* shared, int warp, int present) {
    Operands operands{};
    find_operands<0>(operands, warp);
    const float *input = shared + operands.input[0], *gradient = shared + operands.gradient[0];
    const int input_half = operands.input[1] - operands.input[0];
    const int gradient_half = operands.gradient[1] - operands.gradient[0];
#pragma unroll 2
    for (int r = present * operands.groups; r > 0; --r) {
        const Four n[2] = {four(input), four(input + input_half)};
        const Four g[2] = {four(gradient), four(gradient + gradient_half)};
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[i][j] += g[i / 4].at[i % 4] * n[j / 4].at[j % 4];
        input += operands.input_pitch, gradient += operands.gradient_pitch;
    }
}

// Sums of G over rows; the last warps, which have the least work, come first.
template <int L, int BEFORE>
__device__ __forceinline__ void add_bias_gradient(float* shared, int present) {
    constexpr Layer layer = LAYERS[L];
    constexpr bool needed = layer.bias || layer.norm;
    if constexpr (needed) {
        const int thread = (2 * THREADS - 1 - thread_number() - BEFORE % THREADS) % THREADS;
        for (int o = thread; o < layer.outputs; o += THREADS) {
            const float* gradient = shared + layer.gradient_at + o;
            float sum = 0.f;
#pragma unroll 4
            for (int r = 0; r < present * layer.groups; ++r) sum += gradient[r * Of<L>::gradient_pitch];
            shared[layer.sums_at + o] += sum;
        }
    }
    if constexpr (L < LAST) add_bias_gradient<L + 1, BEFORE + (needed ? layer.outputs : 0)>(shared, present);
}

// Stores a lane's sums to the CTA's part of the gradients, or loads them.
template <int L, bool STORE>
__device__ __forceinline__ void move_sums(float (&sums)[8][8], float* slot, const Share<L>& share) {
    constexpr Layer layer = LAYERS[L];
    constexpr int features = layer.features, from = Of<L>::weight_result;
    constexpr int VECTOR = features % 4 == 0 && from % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int o = share.output(i / 4) + i % 4;
#pragma unroll
        for (int j = 0; j < 8; j += VECTOR) {
            const int f = share.feature(j / 4) + j % 4;
            if (!share.has_output(o) || !share.has_feature(f)) continue;
            Pack<float, VECTOR> pack;
            if constexpr (!STORE) pack = load_pack<float, VECTOR>(slot + from + o * features + f);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                if constexpr (STORE)
                    pack.at[e] = sums[i][j + e];
                else
                    sums[i][j + e] = pack.at[e];
            }
            if constexpr (STORE) store_pack(slot + from + o * features + f, pack);
        }
    }
}

template <int L, bool STORE>
__device__ __forceinline__ void move_any_sums(float (&sums)[8][8], float* slot, int warp) {
    const Share<L> share(warp);
    if (share.any()) move_sums<L, STORE>(sums, slot, share);
    if constexpr (L < LAST) move_any_sums<L + 1, STORE>(sums, slot, warp);
}
