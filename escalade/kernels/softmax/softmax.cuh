// Result of a class: activated(softmax), or with LOG activated(log(softmax)).
#pragma once

#include "common/epilogue.cuh"
#include "common/softmax.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
#define LOG false                 // "true" if problem.log else "false"
constexpr bool HAS_RELU = false;  // problem.relu
#endif

__device__ __forceinline__ Element finished(float term, float divisor) {
    return from_float<Element>(activated<HAS_RELU>(softmax_result<LOG>(term, divisor)));
}
