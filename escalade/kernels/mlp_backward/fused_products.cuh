// GEMMs of fused.cu over the rows of a tile, forwards (N W^T) and backwards (G W), as split-K parts in scratch.
#pragma once

#include "mlp_backward/fused_layers.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int SCRATCH_AT = 1196;  // plan.scratch_at: offset in floats
#endif

template <int L, bool FORWARDS>
struct Product {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int rows = Of<L>::rows;
    static constexpr int columns = FORWARDS ? layer.outputs : layer.features;
    static constexpr int splits = FORWARDS ? layer.forward_splits : layer.backward_splits;
    static constexpr int row_tiles = rows / 4, column_tiles = fours(columns);

    // Offset in scratch of one split; the next is `split_pitch` further.
    static constexpr int split_pitch = rows * column_tiles * 4;
    static __device__ __forceinline__ int at(int r, int c) { return SCRATCH_AT + r * column_tiles * 4 + c; }

    static __device__ __forceinline__ float sum(const float* shared, int r, int c) {
        float total = shared[at(r, c)];
#pragma unroll 4
        for (int split = 1; split < splits; ++split) total += shared[at(r, c) + split * split_pitch];
        return total;
    }

    static __device__ __forceinline__ void multiply(float* shared) {
        constexpr int depth = fours(FORWARDS ? layer.features : layer.outputs);
        constexpr int each = (depth + splits - 1) / splits;
        constexpr int left_pitch = FORWARDS ? Of<L>::input_pitch : Of<L>::gradient_pitch;
        constexpr int weight_pitch = Of<L>::input_pitch;
        constexpr int left_step = row_tiles * left_pitch;
        for (int task = thread_number(); task < row_tiles * column_tiles * splits; task += THREADS) {
            const int column_tile = task % column_tiles, row_tile = task / column_tiles % row_tiles;
            const int split = task / (column_tiles * row_tiles);
            const float* left = shared + (FORWARDS ? layer.input_at : layer.gradient_at) + row_tile * left_pitch;
            const float* right = shared + layer.weight_at + (FORWARDS ? column_tile * weight_pitch : column_tile * 4);
            const int end = min(depth, (split + 1) * each);
            float sums[4][4] = {};
#pragma unroll 1
            for (int q = split * each; q < end; ++q) {
                Four b[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int row = FORWARDS ? j * column_tiles : q * 4 + j;
                    b[j] = four(right + row * weight_pitch + (FORWARDS ? q * 4 : 0));
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Four a = four(left + i * left_step + q * 4);
#pragma unroll
                    for (int j = 0; j < 4; ++j)
#pragma unroll
                        for (int k = 0; k < 4; ++k) sums[i][j] += a.at[k] * (FORWARDS ? b[j].at[k] : b[k].at[j]);
                }
            }
            float* target = shared + split * split_pitch;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i * row_tiles + row_tile;
                if constexpr (FORWARDS) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) target[at(r, j * column_tiles + column_tile)] = sums[i][j];
                } else {
                    store_pack(target + at(r, column_tile * 4), Four{sums[i][0], sums[i][1], sums[i][2], sums[i][3]});
                }
            }
        }
    }
};
