// Walk of fused.cu over a tile of rows: forward for every layer's inputs N and slopes, backward for its gradients G.
#pragma once

#include "common/warp.cuh"
#include "mlp_backward/activation.cuh"
#include "mlp_backward/fused_products.cuh"

// ------------------------------------------------------------------ forward

// N, one warp per row: subtract the mean, divide by the deviation.
template <int L>
__device__ __forceinline__ void normalize(float* shared) {
    constexpr Layer layer = LAYERS[L];
    const int lane = thread_number() % 32;
    for (int r = thread_number() / 32; r < Of<L>::rows; r += WARPS) {
        float* row = shared + layer.input_at + r * Of<L>::input_pitch;
        float sum = 0.f, squares = 0.f;
        for (int f = lane; f < layer.features; f += 32) sum += row[f];
        const float mean = warp_sum(sum) / layer.features;
        for (int f = lane; f < layer.features; f += 32) squares += (row[f] - mean) * (row[f] - mean);
        const float rstd = 1.f / sqrtf(warp_sum(squares) / layer.features + layer.epsilon);
        for (int f = lane; f < layer.features; f += 32) row[f] = (row[f] - mean) * rstd;
        if (lane == 0) shared[layer.rstd_at + r] = rstd;
    }
}

template <int L>
__device__ __forceinline__ void forwards(float* shared, const Element* grad_y, int present) {
    using Here = Of<L>;
    constexpr Layer layer = LAYERS[L];
    if constexpr (layer.norm) {
        normalize<L>(shared);
        __syncthreads();
    }
    if constexpr (L < LAST || layer.activation != 0) {
        using Forwards = Product<L, true>;
        Forwards::multiply(shared);
        __syncthreads();
#pragma unroll 2
        for (int at = thread_number(); at < TILE_ROWS * Here::width_out; at += THREADS) {
            const int t = at / Here::width_out, i = at % Here::width_out;
            const int r = t * layer.groups + i / layer.outputs, o = i % layer.outputs;
            const Activated result =
                activate_with_slope<layer.activation>(Forwards::sum(shared, r, o) + shared[layer.bias_at + o]);
            if constexpr (L < LAST) {
                shared[Of<L + 1>::input_at(t, i)] = result.value;
                if constexpr (layer.activation != 0) shared[Here::gradient_at(t, i)] = result.slope;
            } else {
                const float gradient = t < present ? to_float(grad_y[at]) : 0.f;
                shared[Here::gradient_at(t, i)] = through_slope<layer.activation>(gradient, result.slope);
            }
        }
        __syncthreads();
    }
    if constexpr (L < LAST) forwards<L + 1>(shared, grad_y, present);
}

// ------------------------------------------------------------------ backward

// Passes the gradient of element i of row t of layer L's input through the activation before it.
template <int L>
__device__ __forceinline__ void pass_on(float* shared, float* grad_x, int t, int i, float gradient, int present) {
    if constexpr (L > 0) {
        float& target = shared[Of<L - 1>::gradient_at(t, i)];  // holds the slope
        constexpr int activation = LAYERS[L - 1].activation;
        if constexpr (activation == 0)
            target = gradient;
        else
            target = through_slope<activation>(gradient, target);
    } else {
        if (t < present) grad_x[t * Of<0>::width_in + i] = gradient;
    }
}

template <int L>
__device__ __forceinline__ void backwards(float* shared, float* grad_x, int present) {
    using Here = Of<L>;
    using Backwards = Product<L, false>;
    constexpr Layer layer = LAYERS[L];
    if constexpr (L > 0 || INPUT_GRADIENT) {
        Backwards::multiply(shared);
        __syncthreads();
        if constexpr (layer.norm) {
            const int lane = thread_number() % 32;
            for (int r = thread_number() / 32; r < Here::rows; r += WARPS) {
                const float* hat = shared + layer.input_at + r * Here::input_pitch;
                float sum = 0.f, along = 0.f;
                for (int f = lane; f < layer.features; f += 32) {
                    const float gradient = Backwards::sum(shared, r, f);
                    shared[Backwards::at(r, f)] = gradient;
                    sum += gradient;
                    along += gradient * hat[f];
                }
                const float mean = warp_sum(sum) / layer.features, mean_along = warp_sum(along) / layer.features;
                const float rstd = shared[layer.rstd_at + r];
                const int t = r / layer.groups, first = r % layer.groups * layer.features;
                for (int f = lane; f < layer.features; f += 32) {
                    const float gradient = rstd * (shared[Backwards::at(r, f)] - mean - hat[f] * mean_along);
                    pass_on<L>(shared, grad_x, t, first + f, gradient, present);
                }
            }
        } else {
#pragma unroll 2
            for (int at = thread_number(); at < TILE_ROWS * Here::width_in; at += THREADS) {
                const int t = at / Here::width_in, i = at % Here::width_in;
                const float gradient =
                    Backwards::sum(shared, t * layer.groups + i / layer.features, i % layer.features);
                pass_on<L>(shared, grad_x, t, i, gradient, present);
            }
        }
        __syncthreads();
    }
    if constexpr (L > 0) backwards<L - 1>(shared, grad_x, present);
}
