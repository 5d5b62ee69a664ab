// The activation of a layer, by its number: 0 none, 1 ReLU, 2 GELU, 3 GELU by tanh. GELU and GELU_TANH name the forms of
// the last two; the second is exact unless the prelude says otherwise.
#pragma once

#include "common/epilogue.cuh"
#include "common/gelu.cuh"

#ifndef GELU_TANH
#define GELU_TANH gelu_tanh
#endif

template <int ACTIVATION>
__device__ __forceinline__ float activate(float value) {
    if constexpr (ACTIVATION == 1) return relu(value);
    if constexpr (ACTIVATION == 2) return GELU(value);
    if constexpr (ACTIVATION == 3) return GELU_TANH(value);
    return value;
}
