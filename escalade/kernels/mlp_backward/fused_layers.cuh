// Layers of fused.cu from the prelude (LAYER_LIST), and the smem layout of their rows.
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
constexpr int TILE_ROWS = 8;  // config.rows
constexpr int THREADS = 256;  // config.threads
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

struct Layer {
    int features, outputs, groups;
    bool norm, bias;
    int activation;
    float epsilon;
    int parameter;                                                    // index of its first tensor
    int result;                                                       // offset of their gradients
    int input_at, gradient_at, weight_at, bias_at, sums_at, rstd_at;  // smem offsets, in floats
    int forward_splits, backward_splits;
    bool wide;       // a warp's share of the weights is 64 features by 32 outputs, not 32 by 64
    int first_warp;  // of those that have a share
};
constexpr Layer LAYERS[] = {LAYER_LIST};
constexpr int COUNT = sizeof(LAYERS) / sizeof(Layer), LAST = COUNT - 1, WARPS = THREADS / 32;
using Four = Pack<float, 4>;

__device__ __forceinline__ constexpr int fours(int count) { return (count + 3) / 4; }
// An odd number of 16-byte packs: the same pack of eight adjacent rows covers all banks.
__device__ __forceinline__ constexpr int pitch_of(int columns) { return 4 * (fours(columns) | 1); }

__device__ __forceinline__ Four four(const float* from) { return load_pack<float, 4>(from); }

template <int L>
struct Of {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int rows = TILE_ROWS * layer.groups;
    static constexpr int width_in = layer.groups * layer.features, width_out = layer.groups * layer.outputs;
    static constexpr int input_pitch = pitch_of(layer.features), gradient_pitch = pitch_of(layer.outputs);
    static constexpr int weight = layer.parameter + (layer.norm ? 2 : 0);
    static constexpr int weight_result = layer.result + (layer.norm ? 2 * layer.features : 0);
    static constexpr int bias_result = weight_result + layer.features * layer.outputs;

    // Offset of element i of row t of the tile.
    static __device__ __forceinline__ int input_at(int t, int i) {
        return layer.input_at + (t * layer.groups + i / layer.features) * input_pitch + i % layer.features;
    }
    static __device__ __forceinline__ int gradient_at(int t, int i) {
        return layer.gradient_at + (t * layer.groups + i / layer.outputs) * gradient_pitch + i % layer.outputs;
    }
};
