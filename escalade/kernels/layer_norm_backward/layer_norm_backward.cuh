// Gradients of y = (x - mean) * rstd * weight + bias, where mean and rstd = 1 / sqrt(variance + epsilon) are those of a
// row of x: with n = (x - mean) * rstd and g = dy * weight,
//
//   dx = rstd * (g - sum(g) / features - n * sum(g * n) / features),  dweight = sum(dy * n),  dbias = sum(dy),
//
// the first two sums over a row, the last two over all rows. HAS_MEAN is false for RMS norm: its mean is 0, and dx has
// no term sum(g). With HAS_RESIDUAL, `residual` is added to dx; with HAS_ROUNDED, dx is also written to `rounded`.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype: that of x
using Gradient = float;            // problem.read: the dtype of dy
using Result = float;              // problem.result: the dtype of dx
using Residual = float;            // problem.residual or problem.dtype: the dtype of what is added to dx
using Rounded = float;             // problem.rounded or problem.dtype: the dtype of the copy of dx
constexpr bool HAS_MEAN = true;    // not problem.rms
constexpr bool HAS_WEIGHT = true;  // problem.weight
constexpr bool HAS_RESIDUAL = false;  // problem.residual != ""
constexpr bool HAS_ROUNDED = false;   // problem.rounded != ""
#endif

// Statistics and sums of a row, from sum(g) and the sums of squares and of g * (x - mean).
struct RowSums {
    float mean, rstd, of_gradient, of_product;

    __device__ __forceinline__ RowSums(float mean, float gradients, float squares, float products, int features,
                                       float epsilon)
        : mean(mean), rstd(rsqrtf(squares / features + epsilon)), of_gradient(HAS_MEAN ? gradients / features : 0.f),
          of_product(products * rstd / features) {}

    __device__ __forceinline__ float normalized(float x) const { return (x - mean) * rstd; }
    __device__ __forceinline__ float gradient(float g, float n) const {
        return rstd * (g - of_gradient - n * of_product);
    }
};

__device__ __forceinline__ float times_weight(float gradient, const float* weight, int feature) {
    return HAS_WEIGHT ? gradient * weight[feature] : gradient;
}
