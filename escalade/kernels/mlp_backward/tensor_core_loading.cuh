// Loads of a CTA of tensor_core.cu into smem: the weights once, rows for every tile; LayerNorm forward.
#pragma once

#include "common/warp.cuh"
#include "mlp_backward/tensor_core_layers.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool INPUT_GRADIENT = false;  // problem.input_gradient
#endif

template <bool FP32>
struct SourceOf {
    using Type = Element;
};
template <>
struct SourceOf<true> {
    using Type = float;
};

// Weights as Elements, multiplied by the norm's; biases in fp32, with the norm's share.
template <int L, class Parameters>
__device__ __forceinline__ void load_weights(float* shared, const Parameters& parameters) {
    using Here = Of<L>;
    constexpr Layer layer = LAYERS[L];
    using Source = typename SourceOf<layer.from_fp32>::Type;
    constexpr int features = layer.features, VECTOR = features % 4 == 0 ? 4 : 1;
    const Source* weight = static_cast<const Source*>(parameters[Here::weight]);
    Element* target = elements(shared, layer.weight_at);
    if constexpr (layer.norm) {
        const Element* scale = static_cast<const Element*>(parameters[layer.parameter]);
        const Element* shift = static_cast<const Element*>(parameters[layer.parameter + 1]);
        for (int o = threadIdx.x / 32; o < layer.outputs; o += WARPS) {
            float sum = 0.f;
#pragma unroll 4
            for (int f = threadIdx.x % 32; f < features; f += 32) {
                const float w = to_float(weight[o * features + f]);
                target[o * Here::input_pitch + f] = from_float<Element>(w * to_float(scale[f]));
                sum += w * to_float(shift[f]);
            }
            sum = warp_sum(sum);
            if constexpr (layer.bias) sum += to_float(static_cast<const Source*>(parameters[Here::weight + 1])[o]);
            if (threadIdx.x % 32 == 0) shared[layer.bias_at + o] = sum;
        }
    } else {
#pragma unroll 4
        for (int at = threadIdx.x * VECTOR; at < features * layer.outputs; at += THREADS * VECTOR) {
            const Pack<Source, VECTOR> pack = load_pack<Source, VECTOR>(weight + at);
            Pack<Element, VECTOR> narrow;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) narrow.at[e] = from_float<Element>(to_float(pack.at[e]));
            store_pack(target + at / features * Here::input_pitch + at % features, narrow);
        }
        if constexpr (layer.bias)
            for (int o = threadIdx.x; o < layer.outputs; o += THREADS)
                shared[layer.bias_at + o] = to_float(static_cast<const Source*>(parameters[Here::weight + 1])[o]);
    }
    if constexpr (L < LAST) load_weights<L + 1>(shared, parameters);
}

// Starts copying the first `count` elements of a tile of x, as they are stored; zeros behind them.
__device__ __forceinline__ void prefetch_rows(float* staged, const Element* from, int count) {
    constexpr int TOTAL = TILE_ROWS * Of<0>::width_in;  // a multiple of 16
    Element* target = reinterpret_cast<Element*>(staged);
    for (int at = threadIdx.x * 8; at < TOTAL; at += THREADS * 8) {
        if (at >= count || at + 8 <= count) {
            const bool inside = at < count;
            copy_async_16(shared_address(target + at), inside ? from + at : from, inside);
        } else {
            for (int e = 0; e < 8; ++e) target[at + e] = at + e < count ? from[at + e] : from_float<Element>(0.f);
        }
    }
}

// Starts copying the first rows of the gradient of y to the gradients of the last layer; zeros behind them.
__device__ __forceinline__ void prefetch_gradient(float* shared, const Element* from, int present) {
    using Here = Of<LAST>;
    Element* target = elements(shared, LAYERS[LAST].gradient_at);
    constexpr int VECTOR = LAYERS[LAST].outputs % 8 == 0 ? 8 : 1;
    const int count = present * Here::width_out;
    for (int at = threadIdx.x * VECTOR; at < TILE_ROWS * Here::width_out; at += THREADS * VECTOR) {
        Element* place = target + Here::gradient_at(at / Here::width_out, at % Here::width_out);
        const bool inside = at < count;
        if constexpr (VECTOR == 8)
            copy_async_16(shared_address(place), inside ? from + at : from, inside);
        else
            *place = inside ? from[at] : from_float<Element>(0.f);
    }
}

// ------------------------------------------------------------------ rows, by some lanes each

// Division of rows among lanes, and of a row's features among the lanes that share it: VECTOR adjacent ones at a time.
template <int FEATURES>
struct Lanes {
    static constexpr int VECTOR = FEATURES % 8 == 0 ? 8 : 1;
    static constexpr int PACKS = FEATURES / VECTOR;
    static constexpr int COUNT = PACKS > 16 ? 32 : PACKS > 8 ? 16 : PACKS > 4 ? 8 : PACKS > 2 ? 4 : 2;
    static constexpr int EACH = (PACKS + COUNT - 1) / COUNT;  // packs per lane
    using Values = float[EACH][VECTOR];

    int thread = thread_number();

    __device__ __forceinline__ int lane() const { return thread % COUNT; }
    __device__ __forceinline__ int first_row() const { return thread / COUNT; }
    __device__ __forceinline__ int pack(int each) const { return each * COUNT + lane(); }
    static __device__ __forceinline__ bool has(int pack) { return PACKS % COUNT == 0 || pack < PACKS; }

    __device__ __forceinline__ void load(Values& values, const Element* row) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            Pack<Element, VECTOR> loaded{};
            if (has(pack(i))) loaded = load_pack<Element, VECTOR>(row + pack(i) * VECTOR);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) values[i][e] = to_float(loaded.at[e]);
        }
    }

    __device__ __forceinline__ void store(Element* row, const Values& values) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            Pack<Element, VECTOR> pack_of;
            from_floats(pack_of, values[i]);
            if (has(pack(i))) store_pack(row + pack(i) * VECTOR, pack_of);
        }
    }

    static __device__ __forceinline__ float sum(float value) {
#pragma unroll
        for (int distance = COUNT / 2; distance > 0; distance /= 2)
            value += __shfl_xor_sync(ALL_LANES, value, distance);
        return value;
    }
};

// N: rows of `from` with the mean subtracted, divided by the deviation; or a copy. `from` may be N itself.
template <int L, bool NORM>
__device__ __forceinline__ void load_inputs(float* shared, const Element* from, int pitch) {
    using Here = Of<L>;
    constexpr Layer layer = LAYERS[L];
    using Share = Lanes<layer.features>;
    const Share share;
    Element* target = elements(shared, layer.input_at);
#pragma unroll 2
    for (int r = share.first_row(); r < Here::rows; r += THREADS / Share::COUNT) {
        typename Share::Values values;
        share.load(values, from + r * pitch);
        if constexpr (NORM) {
            float total = 0.f, squares = 0.f;
#pragma unroll
            for (int i = 0; i < Share::EACH; ++i)
#pragma unroll
                for (int e = 0; e < Share::VECTOR; ++e) total += values[i][e];
            const float mean = Share::sum(total) * (1.f / layer.features);
#pragma unroll
            for (int i = 0; i < Share::EACH; ++i)
#pragma unroll
                for (int e = 0; e < Share::VECTOR; ++e) {
                    values[i][e] = Share::has(share.pack(i)) ? values[i][e] - mean : 0.f;
                    squares += values[i][e] * values[i][e];
                }
            const float rstd = rsqrtf(Share::sum(squares) * (1.f / layer.features) + layer.epsilon);
#pragma unroll
            for (int i = 0; i < Share::EACH; ++i)
#pragma unroll
                for (int e = 0; e < Share::VECTOR; ++e) values[i][e] *= rstd;
            if constexpr (L > 0 || INPUT_GRADIENT)
                if (share.lane() == 0) shared[layer.rstd_at + r] = rstd;
        }
        share.store(target + r * Here::input_pitch, values);
    }
}
