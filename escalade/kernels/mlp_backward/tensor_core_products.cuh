// GEMMs of tensor_core.cu over the rows of a tile, forward (N W^T) and backward (G W), and the walk through the layers.
#pragma once

#include "mlp_backward/activation.cuh"
#include "mlp_backward/tensor_core_loading.cuh"

// Two adjacent elements of a row; one at a time where they may be in different groups.
template <bool TOGETHER>
struct PairOf {
    static __device__ __forceinline__ float2 load(const Element* first, const Element* second) {
        if constexpr (TOGETHER) return unpack_pair<Element>(*reinterpret_cast<const u32*>(first));
        return {to_float(*first), to_float(*second)};
    }
    static __device__ __forceinline__ void store(Element* first, Element* second, float2 values) {
        if constexpr (TOGETHER) {
            *reinterpret_cast<u32*>(first) = pack_pair<Element>(values.x, values.y);
        } else {
            *first = from_float<Element>(values.x);
            if (second) *second = from_float<Element>(values.y);
        }
    }
};

template <int L, bool FORWARD>
struct Product {
    using Here = Of<L>;
    static constexpr Layer layer = LAYERS[L];
    static constexpr int columns = FORWARD ? layer.outputs : layer.features, padded = whole_steps(columns);
    static constexpr int steps = whole_steps(FORWARD ? layer.features : layer.outputs) / STEP;
    static constexpr int strips = Here::rows / STEP;
    // A warp has 16 rows by 32 columns if there are enough of those for most warps, else by 16.
    static constexpr bool large = padded % 32 == 0 && strips * (padded / 32) * 4 >= WARPS * 3;
    static constexpr int tiles = large ? 4 : 2;  // of eight columns
    static constexpr int chunks = padded / (8 * tiles), units = strips * chunks;
    static constexpr int chains = !large && steps >= 4 ? 2 : 1;  // independent sums, whose latencies overlap

    // Calls epilogue(row, column, two adjacent sums) for each pair of columns, of which the second may be padding.
    template <class Epilogue>
    static __device__ __forceinline__ void multiply(float* shared, const Epilogue& epilogue) {
        const int warp = thread_number() / 32, lane = thread_number() % 32;
        constexpr int pitch = FORWARD ? Here::input_pitch : Here::gradient_pitch;
        constexpr int weight_pitch = Here::input_pitch, size = sizeof(Element);
        const u32 rows_at = shared_address(shared + (FORWARD ? layer.input_at : layer.gradient_at)) +
                            (lane % 16 * pitch + lane / 16 * 8) * size;
        const int line = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
        // Forward, columns are rows of W; backward, k is.
        const u32 weights_at = shared_address(shared + layer.weight_at) +
                               (FORWARD ? (third + line) * weight_pitch + second
                                        : (second + line) * weight_pitch + third) * size;
        constexpr int across = (FORWARD ? weight_pitch : 1) * size, along = (FORWARD ? 1 : weight_pitch) * size;
#pragma unroll 1
        for (int unit = warp; unit < units; unit += WARPS) {
            const int strip = unit / chunks, chunk = unit % chunks;
            const u32 a_at = rows_at + strip * STEP * pitch * size, b_at = weights_at + chunk * tiles * 8 * across;
            float sums[chains][tiles][4] = {};
#pragma unroll 2
            for (int step = 0; step < steps; step += chains)
#pragma unroll
                for (int chain = 0; chain < chains; ++chain) {
                    if (steps % chains && step + chain >= steps) break;
                    u32 a[4], b[tiles][2];
                    load_matrices(a, a_at + (step + chain) * STEP * size);
#pragma unroll
                    for (int tile = 0; tile < tiles; tile += 2) {
                        u32 four[4];
                        const u32 at = b_at + tile * 8 * across + (step + chain) * STEP * along;
                        if constexpr (FORWARD)
                            load_matrices(four, at);
                        else
                            load_matrices_transposed(four, at);
                        b[tile][0] = four[0], b[tile][1] = four[1], b[tile + 1][0] = four[2], b[tile + 1][1] = four[3];
                    }
#pragma unroll
                    for (int tile = 0; tile < tiles; ++tile) multiply_add<Element>(sums[chain][tile], a, b[tile]);
                }
#pragma unroll
            for (int tile = 0; tile < tiles; ++tile) {
                const int column = (chunk * tiles + tile) * 8 + lane % 4 * 2;
                if (columns % STEP && column >= columns) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float2 pair{sums[0][tile][2 * half], sums[0][tile][2 * half + 1]};
                    if constexpr (chains == 2)
                        pair.x += sums[chains - 1][tile][2 * half], pair.y += sums[chains - 1][tile][2 * half + 1];
                    epilogue(strip * STEP + half * 8 + lane / 4, column, pair);
                }
            }
        }
    }
};

// ------------------------------------------------------------------ forward

// The next layer's inputs and this layer's slopes; or this layer's gradients, if it is the last. Missing rows
// stay zero, whatever the weights.
template <int L>
__device__ __forceinline__ void forward(float* shared, const Element* grad_y, int present) {
    using Here = Of<L>;
    constexpr Layer layer = LAYERS[L];
    if constexpr (L < LAST || layer.activation != 0) {
        Product<L, true>::multiply(shared, [&](int r, int o, float2 sums) {
            const int t = r / layer.groups, i = r % layer.groups * layer.outputs + o;
            const bool there = t < present, both = layer.outputs % 2 == 0 || o + 1 < layer.outputs;
            if constexpr (Here::has_shift) {
                const float* bias = shared + layer.bias_at + o;
                sums.x += bias[0], sums.y += bias[1];
            }
            const Activated first = activate_with_slope_fitted<LAYERS[L].activation>(sums.x);
            const Activated second = activate_with_slope_fitted<LAYERS[L].activation>(sums.y);
            Element* slope = elements(shared, layer.gradient_at) + r * Here::gradient_pitch + o;
            if constexpr (L < LAST) {
                using Next = Of<L + 1>;
                constexpr bool TOGETHER = LAYERS[L].outputs % 2 == 0 && Next::layer.features % 2 == 0;
                Element* value = elements(shared, Next::layer.input_at);
                const float2 values = there ? float2{first.value, second.value} : float2{};
                PairOf<TOGETHER>::store(value + Next::input_at(t, i), both ? value + Next::input_at(t, i + 1) : nullptr,
                                        values);
                if constexpr (LAYERS[L].activation != 0) PairOf<true>::store(slope, slope, {first.slope, both ? second.slope : 0.f});
            } else {
                float2 gradient{};
                if (there) {
                    const Element* from = grad_y + t * Here::width_out + i;
                    gradient.x = through_slope<LAYERS[L].activation>(to_float(from[0]), first.slope);
                    if (both) gradient.y = through_slope<LAYERS[L].activation>(to_float(from[1]), second.slope);
                }
                PairOf<true>::store(slope, slope, gradient);
            }
        });
        __syncthreads();
    }
    if constexpr (L < LAST) {
        if constexpr (LAYERS[L + 1].norm) {
            load_inputs<L + 1, true>(shared, elements(shared, LAYERS[L + 1].input_at), Of<L + 1>::input_pitch);
            __syncthreads();
        }
        forward<L + 1>(shared, grad_y, present);
    }
}

// ------------------------------------------------------------------ backward

// Passes two gradients, of elements i and i + 1 of row t of layer L's input, through the activation before it; the
// second only if there are `both`. The gradient replaces the slope.
template <int L, bool PAIR>
__device__ __forceinline__ void pass_on(float* shared, float* grad_x, int t, int i, float2 gradients, bool both,
                                        int present) {
    if constexpr (L > 0) {
        using Before = Of<L - 1>;
        constexpr int activation = LAYERS[L - 1].activation;
        constexpr bool TOGETHER = PAIR && LAYERS[L].features % 2 == 0 && LAYERS[L - 1].outputs % 2 == 0;
        Element* target = elements(shared, LAYERS[L - 1].gradient_at);
        Element *first = target + Before::gradient_at(t, i), *second = nullptr;
        if (both) second = target + Before::gradient_at(t, i + 1);
        if constexpr (activation != 0) {
            const float2 slopes = PairOf<TOGETHER>::load(first, both ? second : first);
            gradients.x = through_slope<activation>(gradients.x, slopes.x);
            gradients.y = through_slope<activation>(gradients.y, slopes.y);
        }
        PairOf<TOGETHER>::store(first, second, t < present ? gradients : float2{});
    } else if (t < present) {
        grad_x[t * Of<0>::width_in + i] = gradients.x;
        if (both) grad_x[t * Of<0>::width_in + i + 1] = gradients.y;
    }
}

// g = rstd * (h - mean(h) - N * mean(h * N)), with h the gradients of the normalized rows.
template <int L>
__device__ __forceinline__ void through_norm(float* shared, float* grad_x, int present) {
    using Here = Of<L>;
    constexpr Layer layer = LAYERS[L];
    using Share = Lanes<layer.features>;
    const Share share;
    for (int r = share.first_row(); r < Here::rows; r += THREADS / Share::COUNT) {
        typename Share::Values raw, hat;
        share.load(raw, elements(shared, layer.raw_at) + r * Here::input_pitch);
        share.load(hat, elements(shared, layer.input_at) + r * Here::input_pitch);
        float sum = 0.f, along = 0.f;
#pragma unroll
        for (int i = 0; i < Share::EACH; ++i)
#pragma unroll
            for (int e = 0; e < Share::VECTOR; ++e) sum += raw[i][e], along += raw[i][e] * hat[i][e];
        const float mean = Share::sum(sum) * (1.f / layer.features);
        const float mean_along = Share::sum(along) * (1.f / layer.features);
        const float rstd = shared[layer.rstd_at + r];
        const auto gradient = [&](int i, int e) { return rstd * (raw[i][e] - mean - hat[i][e] * mean_along); };
        const int t = r / layer.groups, first = r % layer.groups * layer.features;
#pragma unroll
        for (int i = 0; i < Share::EACH; ++i) {
            if (!Share::has(share.pack(i))) continue;
            const int f = first + share.pack(i) * Share::VECTOR;
            if constexpr (Share::VECTOR == 1) {
                pass_on<L, false>(shared, grad_x, t, f, {gradient(i, 0), 0.f}, false, present);
            } else {
#pragma unroll
                for (int e = 0; e < Share::VECTOR; e += 2)
                    pass_on<L, true>(shared, grad_x, t, f + e, {gradient(i, e), gradient(i, e + 1)}, true, present);
            }
        }
    }
}

template <int L>
__device__ __forceinline__ void backward(float* shared, float* grad_x, int present) {
    using Here = Of<L>;
    constexpr Layer layer = LAYERS[L];
    if constexpr (L > 0 || INPUT_GRADIENT) {
        Product<L, false>::multiply(shared, [&](int r, int f, float2 sums) {
            const bool both = layer.features % 2 == 0 || f + 1 < layer.features;
            if constexpr (LAYERS[L].norm) {
                Element* raw = elements(shared, layer.raw_at) + r * Here::input_pitch + f;
                PairOf<true>::store(raw, raw, sums);
            } else {
                pass_on<L, true>(shared, grad_x, r / layer.groups, r % layer.groups * layer.features + f, sums, both, present);
            }
        });
        __syncthreads();
        if constexpr (layer.norm) {
            through_norm<L>(shared, grad_x, present);
            __syncthreads();
        }
    }
}

// The layers from L to the first.
template <int L>
__device__ __forceinline__ void backward_from(float* shared, float* grad_x, int present) {
    backward<L>(shared, grad_x, present);
    if constexpr (L > 0) backward_from<L - 1>(shared, grad_x, present);
}
