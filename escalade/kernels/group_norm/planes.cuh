// Weight and bias in NCHW: those of the plane of an element of a row, where a row is a group of an image.
#pragma once

#include "common/epilogue.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype: that of x
using Result = float;              // problem.result: the dtype of y
using Parameter = float;           // problem.parameters: the dtype of weight and bias
constexpr bool HAS_WEIGHT = true;  // problem.weight
constexpr bool HAS_BIAS = true;    // problem.bias
constexpr bool HAS_RELU = false;   // problem.relu
constexpr bool HAS_STATISTICS = false;  // problem.statistics: also write mean and rstd
constexpr int PLANE = 0;           // problem.pixels if planes else 0: NCHW with weight or bias; 0 otherwise
constexpr int IMAGE_GROUPS = 1;    // problem.groups if planes else 1
constexpr int ROW_CHANNELS = 1;    // problem.group_channels if planes else 1
#endif

struct Planes {
    const Parameter *weight, *bias;

    // Of row number `row`.
    __device__ __forceinline__ Planes(int row, const Parameter* weight, const Parameter* bias)
        : weight(weight + row % IMAGE_GROUPS * ROW_CHANNELS), bias(bias + row % IMAGE_GROUPS * ROW_CHANNELS) {}

    __device__ __forceinline__ float scaled(float value, int at) const {
        const int channel = at / (PLANE ? PLANE : 1);
        if (HAS_WEIGHT) value *= to_float(weight[channel]);
        if (HAS_BIAS) value += to_float(bias[channel]);
        return value;
    }
};
