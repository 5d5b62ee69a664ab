// Sums of a CTA of tensor_core.cu over its rows, in registers: H = G^T N of every layer, and the sums of G. At the end they
// are moved to the CTA's part and to smem.
#pragma once

#include "mlp_backward/tensor_core_layers.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int MOST_SPLITS = 2;  // most_splits: warps per share, in any layer
#endif

struct Sums {
    float weights[16][4];  // MMA accumulators of the warp's share: outputs by features
    float gradients[4];    // column i: sums of G of the share's 16 outputs i
};

template <int L>
struct Share {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int features = layer.wide ? 64 : 32, outputs = layer.wide ? 32 : 64;
    static constexpr int across = (layer.features + features - 1) / features;
    static constexpr int down = (layer.outputs + outputs - 1) / outputs;
    static constexpr int tiles_m = outputs / 16, tiles_n = features / 8;
    int tile, split;

    __device__ __forceinline__ explicit Share(int warp)
        : tile((warp - layer.first_warp) % (across * down)), split((warp - layer.first_warp) / (across * down)) {
        if (warp < layer.first_warp) split = layer.splits;
    }
    __device__ __forceinline__ bool any() const { return split < layer.splits; }
    __device__ __forceinline__ bool sums_gradients() const { return Of<L>::has_shift && tile % across == 0; }
    __device__ __forceinline__ int feature() const { return tile % across * features; }
    __device__ __forceinline__ int output() const { return tile / across * outputs; }

    // Tiles past the last column are multiplied too, with the first columns instead, and never stored.
    static __device__ __forceinline__ int column(int at, int columns) {
        return at < whole_steps(columns) ? at : 0;
    }

    __device__ __forceinline__ void add(Sums& sums, float* shared) const {
        using Here = Of<L>;
        constexpr int size = sizeof(Element), steps = Here::rows / STEP;
        constexpr int row_bytes_g = Here::gradient_pitch * size, row_bytes_n = Here::input_pitch * size;
        const int lane = thread_number() % 32, line = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
        const u32 g_at = shared_address(shared + layer.gradient_at) + (third + line) * row_bytes_g + second * size;
        const u32 n_at = shared_address(shared + layer.input_at) + (second + line) * row_bytes_n + third * size;
        const int first_o = output(), first_f = feature();
        const bool all = sums_gradients();
        const u32 ones = pack_pair<Element>(1.f, 1.f);
        const int begin = split * steps / layer.splits, end = (split + 1) * steps / layer.splits;
#pragma unroll 1
        for (int step = begin; step < end; ++step) {
            u32 g[tiles_m][4];
#pragma unroll
            for (int i = 0; i < tiles_m; ++i)
                load_matrices_transposed(
                    g[i], g_at + step * STEP * row_bytes_g + column(first_o + i * 16, layer.outputs) * size);
#pragma unroll
            for (int j = 0; j < tiles_n; j += 2) {
                u32 n[4];
                load_matrices_transposed(
                    n, n_at + step * STEP * row_bytes_n + column(first_f + j * 8, layer.features) * size);
                const u32 low[2] = {n[0], n[1]}, high[2] = {n[2], n[3]};
#pragma unroll
                for (int i = 0; i < tiles_m; ++i) {
                    multiply_add<Element>(sums.weights[i * tiles_n + j], g[i], low);
                    multiply_add<Element>(sums.weights[i * tiles_n + j + 1], g[i], high);
                }
            }
            if (all) {
#pragma unroll
                for (int i = 0; i < tiles_m; ++i) {
                    const u32 own = lane / 4 == i ? ones : 0;  // a matrix whose column i is ones
                    const u32 column_of_ones[2] = {own, own};
                    multiply_add<Element>(sums.gradients, g[i], column_of_ones);
                }
            }
        }
    }

    // Stores the warp's sums; the warps of the same share add theirs later.
    template <bool ADD>
    __device__ __forceinline__ void move(const Sums& sums, float* slot, float* shared) const {
        using Here = Of<L>;
        const int lane = thread_number() % 32, group = lane / 4, member = lane % 4;
        float* const target = slot + Here::weight_result;
#pragma unroll
        for (int i = 0; i < tiles_m; ++i)
#pragma unroll
            for (int j = 0; j < tiles_n; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int o = output() + i * 16 + e / 2 * 8 + group, f = feature() + j * 8 + member * 2 + e % 2;
                    if (o >= layer.outputs || f >= layer.features) continue;
                    float& place = target[o * layer.features + f];
                    place = ADD ? place + sums.weights[i * tiles_n + j][e] : sums.weights[i * tiles_n + j][e];
                }
        if (sums_gradients())
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = member * 2 + e % 2, o = output() + i * 16 + e / 2 * 8 + group;
                if (i < tiles_m && o < layer.outputs) shared[layer.sums_at + o] += sums.gradients[e];
            }
    }
};

template <int L>
__device__ __forceinline__ void add_weight_gradient(Sums& sums, float* shared, int warp) {
    const Share<L> share(warp);
    if (share.any()) share.add(sums, shared);
}

// Of the layers from L up to END.
template <int L, int END>
__device__ __forceinline__ void add_weight_gradients(Sums& sums, float* shared, int warp) {
    add_weight_gradient<L>(sums, shared, warp);
    if constexpr (L + 1 < END) add_weight_gradients<L + 1, END>(sums, shared, warp);
}

template <int L, int SPLIT>
__device__ __forceinline__ void move_split(const Sums& sums, float* slot, float* shared, int warp) {
    if constexpr (SPLIT < LAYERS[L].splits) {
        const Share<L> share(warp);
        if (share.split == SPLIT) share.template move<(SPLIT > 0)>(sums, slot, shared);
    }
    if constexpr (L < LAST) move_split<L + 1, SPLIT>(sums, slot, shared, warp);
}

template <int SPLIT>
__device__ __forceinline__ void move_sums(const Sums& sums, float* slot, float* shared, int warp) {
    move_split<0, SPLIT>(sums, slot, shared, warp);
    __syncthreads();
    if constexpr (SPLIT + 1 < MOST_SPLITS) move_sums<SPLIT + 1>(sums, slot, shared, warp);
}
