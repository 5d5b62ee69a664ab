// Weight and bias in NCHW: those of the plane of an element of a row, where a row is a group of an image.
#pragma once

#include "common/epilogue.cuh"

struct Planes {
    const Element *weight, *bias;

    // Of row number `row`.
    __device__ __forceinline__ Planes(int row, const Element* weight, const Element* bias)
        : weight(weight + row % IMAGE_GROUPS * ROW_CHANNELS), bias(bias + row % IMAGE_GROUPS * ROW_CHANNELS) {}

    __device__ __forceinline__ float scaled(float value, int at) const {
        const int channel = at / (PLANE ? PLANE : 1);
        if (HAS_WEIGHT) value *= to_float(weight[channel]);
        if (HAS_BIAS) value += to_float(bias[channel]);
        return value;
    }
};
