// Non-overlapping windows in NCHW: a thread takes VECTOR columns of one row of windows.
#pragma once

#include "common/elements.cuh"
#include "common/pool_shape.cuh"
#include "common/ptx.cuh"
#include "common/window_size.cuh"

constexpr int OUTPUTS = VECTOR / STRIDE_W;
static_assert(VECTOR % STRIDE_W == 0 && KERNEL_H <= STRIDE_H && KERNEL_W <= STRIDE_W, "whole, disjoint windows");

struct WindowRow {
    int output_row;
    bool exists;       // false for excess threads
    long long pixel;   // first of x
    long long output;  // first of y
    const PoolShape& shape;

    __device__ __forceinline__ explicit WindowRow(const PoolShape& shape) : shape(shape) {
        const u32 vectors = shape.width / VECTOR, bands = (shape.height + STRIDE_H - 1) / STRIDE_H;
        u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
        const int vector = rest % vectors;
        rest /= vectors;
        output_row = rest % bands;
        const u32 plane = rest / bands;
        exists = plane < static_cast<u32>(shape.batch) * shape.channels;
        pixel = (1LL * plane * shape.height + output_row * STRIDE_H) * shape.width + vector * VECTOR;
        output = (1LL * plane * shape.output_height + output_row) * shape.output_width + vector * OUTPUTS;
    }
    // A few rows below the last windows may belong to none.
    __device__ __forceinline__ bool has_windows() const { return output_row < shape.output_height; }

    // Stores of(window, tap) to every pixel; pixels between windows have tap -1.
    template <class Of>
    __device__ __forceinline__ void store_pixels(Element* x, Of of) const {
#pragma unroll
        for (int r = 0; r < STRIDE_H; ++r) {
            Pack<Element, VECTOR> result;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const int s = e % STRIDE_W;
                result.at[e] = of(e / STRIDE_W, r < KERNEL_H && s < KERNEL_W ? r * KERNEL_W + s : -1);
            }
            if (output_row * STRIDE_H + r < shape.height) store_pack(x + pixel + r * shape.width, result);
        }
    }

    // Calls see(window, value, tap) for every pixel of the windows.
    template <class See>
    __device__ __forceinline__ void load_windows(const Element* x, See see) const {
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r) {
            const Pack<Element, VECTOR> seen = load_pack<Element, VECTOR>(x + pixel + r * shape.width);
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o)
#pragma unroll
                for (int s = 0; s < KERNEL_W; ++s) see(o, to_float(seen.at[o * STRIDE_W + s]), r * KERNEL_W + s);
        }
    }
};
