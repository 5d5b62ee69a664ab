// Gradients of two layers A and B from those of their merger M = B A, m = B a + b, of each group of columns:
//   dA = B^T dM,  da = B^T dm;  dB = dM A^T + dm a^T,  db = dm;  the other parameters' are copied
//
// Either layer may be shared by several groups of its columns, over which its gradients are summed. One thread per
// parameter. Limiter: the launch.
//
// Rung: `folded`. mlp/tensor_core_fold.cu merges the layers.
#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = __half;                // problem.dtype
constexpr int PARAMETERS = 29952;      // problem.parameter_elements
constexpr int FIRST = 15808;           // first: offset of the gradient of A's weights, and of M's
constexpr int MERGED = 10240;          // merged: weights of M
constexpr int ONE_GROUPS = 1;          // one.groups
constexpr int ONE_FEATURES = 32;       // one.features
constexpr int ONE_OUTPUTS = 320;       // one.outputs
constexpr bool ONE_HAS_BIAS = false;   // one.bias
constexpr int OTHER_GROUPS = 5;        // other.groups
constexpr int OTHER_FEATURES = 64;     // other.features
constexpr int OTHER_OUTPUTS = 64;      // other.outputs
constexpr bool OTHER_HAS_BIAS = true;  // other.bias
#endif

constexpr int WIDTH_IN = ONE_GROUPS * ONE_FEATURES, WIDTH_OUT = OTHER_GROUPS * OTHER_OUTPUTS;

// dA[unit][feature]; da[unit], whose column is that of the merged bias.
template <bool BIAS>
__device__ __forceinline__ float gradient_of_one(const float* weights, const float* biases, const Element* other,
                                                 int unit, int feature) {
    float sum = 0.f;
    for (int group = 0; group < ONE_GROUPS; ++group) {
        const int hidden = group * ONE_OUTPUTS + unit;
        const int first = hidden / OTHER_FEATURES * OTHER_OUTPUTS;
        const Element* column = other + hidden % OTHER_FEATURES;
#pragma unroll 8
        for (int o = 0; o < OTHER_OUTPUTS; ++o)
            sum += to_float(column[o * OTHER_FEATURES]) *
                   (BIAS ? biases[first + o] : weights[(first + o) * WIDTH_IN + group * ONE_FEATURES + feature]);
    }
    return sum;
}

// dB[output][feature]
__device__ __forceinline__ float gradient_of_other(const float* weights, const float* biases, const Element* one,
                                                   const Element* one_bias, int output, int feature) {
    float sum = 0.f;
    for (int group = 0; group < OTHER_GROUPS; ++group) {
        const int hidden = group * OTHER_FEATURES + feature, row = group * OTHER_OUTPUTS + output;
        const Element* along = one + hidden % ONE_OUTPUTS * ONE_FEATURES;
        const float* gradient = weights + row * WIDTH_IN + hidden / ONE_OUTPUTS * ONE_FEATURES;
#pragma unroll 8
        for (int i = 0; i < ONE_FEATURES; ++i) sum += gradient[i] * to_float(along[i]);
        if constexpr (ONE_HAS_BIAS) sum += biases[row] * to_float(one_bias[hidden % ONE_OUTPUTS]);
    }
    return sum;
}

extern "C" __global__ void mlp_backward_tensor_core_unfold(const float* merged, const Element* one,
                                                           const Element* one_bias, const Element* other, float* y) {
    wait_for_previous_launch();
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= PARAMETERS) return;
    const float *weights = merged + FIRST, *biases = weights + MERGED;
    constexpr int ONE_BIAS = ONE_OUTPUTS * ONE_FEATURES, OTHER = ONE_BIAS + (ONE_HAS_BIAS ? ONE_OUTPUTS : 0);
    constexpr int OTHER_BIAS = OTHER + OTHER_OUTPUTS * OTHER_FEATURES;
    constexpr int REST = OTHER_BIAS + (OTHER_HAS_BIAS ? OTHER_OUTPUTS : 0);
    const int at = thread - FIRST;
    float gradient = 0.f;
    if (at < 0) {
        gradient = merged[thread];
    } else if (at < ONE_BIAS) {
        gradient = gradient_of_one<false>(weights, biases, other, at / ONE_FEATURES, at % ONE_FEATURES);
    } else if (at < OTHER) {
        gradient = gradient_of_one<true>(weights, biases, other, at - ONE_BIAS, 0);
    } else if (at < OTHER_BIAS) {
        const int weight = at - OTHER;
        gradient = gradient_of_other(weights, biases, one, one_bias, weight / OTHER_FEATURES, weight % OTHER_FEATURES);
    } else if (at < REST) {
        for (int group = 0; group < OTHER_GROUPS; ++group) gradient += biases[group * OTHER_OUTPUTS + at - OTHER_BIAS];
    } else {
        gradient = biases[WIDTH_OUT + at - REST];
    }
    y[thread] = gradient;
}
