// Operands of attention: sizes, strides, and the keys and biases of a query.
//
// q, k, v and y may have any strides between batch items, heads and tokens, so that q, k and v are read in place from
// one packed projection, and y is written as the next layer reads it. The elements of a head are contiguous.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;           // problem.dtype
constexpr int SIZE = 32;         // problem.size: of a head in q and k
constexpr int VALUE_SIZE = 32;   // problem.value_size: of a head in v and y
constexpr bool CAUSAL = false;   // problem.causal: query i reads keys 0 to i
constexpr bool HAS_BIAS = true;  // bool(problem.bias)
#endif

constexpr float LOG2_E = 1.44269504f;

// Strides in elements. A dimension of the bias has stride 0 if it is broadcast; the bias of batch item b is that of
// b % bias_batches: the mask of a window repeats from image to image.
struct AttentionShape {
    int batch, heads, queries, keys;
    int q_batch, q_head, q_token;  // problem.strides("q")
    int k_batch, k_head, k_token;  // problem.strides("k")
    int v_batch, v_head, v_token;  // problem.strides("v")
    int y_batch, y_head, y_token;  // problem.strides("y")
    int bias_batches, bias_batch, bias_head, bias_query, bias_key;  // problem.bias_strides
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

// Keys that a query reads.
__device__ __forceinline__ int keys_of(const AttentionShape& shape, int query) {
    return CAUSAL && query < shape.keys ? query + 1 : shape.keys;
}

__device__ __forceinline__ const Element* head_of(const Element* x, int batch, int head, int batch_stride,
                                                  int head_stride) {
    return x + 1LL * batch * batch_stride + 1LL * head * head_stride;
}

__device__ __forceinline__ const Element* bias_of(const Element* bias, const AttentionShape& shape, int batch, int head,
                                                  int query) {
    return bias + 1LL * (batch % shape.bias_batches) * shape.bias_batch + 1LL * head * shape.bias_head +
           1LL * query * shape.bias_query;
}

// What exponents are relative to: finite, so that masked keys have the exponential 0.
__device__ __forceinline__ float origin(float largest) { return largest == minus_infinity() ? 0.f : largest; }

// Factor of the sum over values. A query whose keys are all masked yields 0, as in PyTorch's operator.
__device__ __forceinline__ float factor_of(float largest, float sum) {
    return largest == minus_infinity() ? 0.f : 1.f / sum;
}
