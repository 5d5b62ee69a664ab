// Activation of a layer, by number: 0 none, 1 ReLU, 2 GELU, 3 GELU with tanh. GELU and GELU_TANH name the
// implementations of the last two; the second is exact unless the prelude overrides it.
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
