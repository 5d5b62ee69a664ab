// Layers of tensor_core.cu from the prelude (LAYER_LIST), and the smem layout of their rows and weights.
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = __half;        // problem.dtype
constexpr int TILE_ROWS = 32;  // config.rows
constexpr int THREADS = 512;   // threads
#endif

#include "common/elements.cuh"
#include "common/mma_tile.cuh"
#include "common/pairs.cuh"
#include "common/ptx.cuh"

struct Layer {
    int features, outputs, groups;
    bool norm, bias;
    int activation;
    float epsilon;
    bool from_fp32;  // weight and bias are fp32, from mlp/tensor_core_fold.cu
    int parameter;   // index of its first tensor
    int result;      // offset of their gradients
    int input_at, gradient_at, weight_at, bias_at, sums_at, rstd_at, raw_at;  // smem offsets, in floats
    bool wide;       // a warp's share of the weights is 64 features by 32 outputs, not 32 by 64
    int first_warp;  // of those that have a share
    int splits;      // warps per share, which divide the rows
};
constexpr Layer LAYERS[] = {LAYER_LIST};
constexpr int COUNT = sizeof(LAYERS) / sizeof(Layer), LAST = COUNT - 1, WARPS = THREADS / 32;
constexpr int STEP = 16;  // rows, columns and k of an MMA are padded to this

__device__ __forceinline__ constexpr int whole_steps(int columns) { return (columns + STEP - 1) / STEP * STEP; }
// Elements between rows: an odd number of 16-byte chunks, so that the same chunk of eight adjacent rows, which one phase
// of ldmatrix reads, covers all banks.
__device__ __forceinline__ constexpr int pitch_of(int columns) { return whole_steps(columns) + 8; }

__device__ __forceinline__ Element* elements(float* shared, int at) { return reinterpret_cast<Element*>(shared + at); }

// A layer's groups are rows of their own.
template <int L>
struct Of {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int rows = TILE_ROWS * layer.groups;
    static constexpr int width_in = layer.groups * layer.features, width_out = layer.groups * layer.outputs;
    static constexpr int input_pitch = pitch_of(layer.features), gradient_pitch = pitch_of(layer.outputs);
    static constexpr int weight = layer.parameter + (layer.norm ? 2 : 0);
    static constexpr int weight_result = layer.result + (layer.norm ? 2 * layer.features : 0);
    static constexpr int bias_result = weight_result + layer.features * layer.outputs;
    static constexpr bool has_shift = layer.bias || layer.norm;

    // Offset in its inputs or gradients of element i of row t of the tile.
    static __device__ __forceinline__ int input_at(int t, int i) {
        if constexpr (layer.groups == 1) return t * input_pitch + i;
        return (t * layer.groups + i / layer.features) * input_pitch + i % layer.features;
    }
    static __device__ __forceinline__ int gradient_at(int t, int i) {
        if constexpr (layer.groups == 1) return t * gradient_pitch + i;
        return (t * layer.groups + i / layer.outputs) * gradient_pitch + i % layer.outputs;
    }
};
