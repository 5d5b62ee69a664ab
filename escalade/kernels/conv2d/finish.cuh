// Epilogue for kernels whose lanes hold adjacent filters or pixels in pairs:
//   activated(sum + bias + residual); in 8 bits bias and residual have scales of their own (common/epilogue.cuh)
//   HAS_MASK: mask > 0 ? sum : 0, the gradient of a ReLU; the mask is passed in place of the residual
#pragma once

#include "common/bytes.cuh"
#include "common/epilogue.cuh"
#include "common/pairs.cuh"

constexpr bool SCALED = sizeof(Element) == 1;
constexpr bool HAS_AUX = HAS_RESIDUAL || HAS_MASK;  // auxiliary tensor of y's shape
static_assert(!HAS_MASK || !(HAS_BIAS || HAS_RESIDUAL || HAS_RELU || SCALED),
              "a mask excludes bias, residual and ReLU");

struct FilterPair {  // bias and scale of two adjacent filters, and vectors of the activation
    float2 bias, scale, a = {1.f, 1.f}, b = {0.f, 0.f};
};

struct Finish {
    const Bias* bias;
    const float* scale;  // per filter
    const Element* residual;
    int filters;
    float residual_scale, result_scale;

    // `scales`: the residual's scale, and the reciprocal of the result's.
    __device__ __forceinline__ Finish(const Bias* bias, const float* scale, const float* scales,
                                      const Element* residual, int filters)
        : bias(bias), scale(scale), residual(residual), filters(filters),
          residual_scale(SCALED && HAS_RESIDUAL ? scales[0] : 1.f), result_scale(SCALED ? scales[1] : 1.f) {}

    // Loads filters `filter` (even) and `filter + 1`, as far as they exist. Call it once, ahead of a loop over pixels.
    __device__ __forceinline__ FilterPair of(int filter) const {
        return {HAS_BIAS ? load_existing(bias, filter) : make_float2(0.f, 0.f),
                SCALED ? load_existing(scale, filter) : make_float2(1.f, 1.f)};
    }

    // One filter, duplicated for two pixels.
    __device__ __forceinline__ FilterPair twice(int filter) const {
        const bool inside = FILTERS_ALIGNED || filter < filters;
        const float added = HAS_BIAS && inside ? to_float(bias[filter]) : 0.f;
        const float unit = SCALED && inside ? scale[filter] : 0.f;
        return {make_float2(added, added), make_float2(unit, unit)};
    }

    __device__ __forceinline__ float value(float sum, int filter, float aux) const {
        const bool inside = FILTERS_ALIGNED || filter < filters;
        return value(sum, HAS_BIAS && inside ? to_float(bias[filter]) : 0.f, SCALED && inside ? scale[filter] : 0.f,
                     aux);
    }

    __device__ __forceinline__ float value(float sum, float added, float unit, float aux) const {
        // as PyTorch does: NaN in the mask passes the gradient
        if constexpr (HAS_MASK) return aux <= 0.f ? 0.f : sum;
        else if constexpr (SCALED)
            return finish_scaled<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(sum, unit, added, aux, residual_scale, result_scale);
        else {
            if (HAS_BIAS) sum += added;
            return activated<HAS_RESIDUAL, HAS_RELU>(sum, aux);
        }
    }

    // Two sums at once: cheaper for some activations.
    __device__ __forceinline__ float2 values(float2 sums, const FilterPair& pair, float2 aux_values) const {
        if constexpr (HAS_MASK || SCALED)
            return make_float2(value(sums.x, pair.bias.x, pair.scale.x, aux_values.x),
                               value(sums.y, pair.bias.y, pair.scale.y, aux_values.y));
        else {
            if (HAS_BIAS) sums.x += pair.bias.x, sums.y += pair.bias.y;
            return activated_pair<HAS_RESIDUAL, HAS_RELU>(sums, aux_values, pair.a, pair.b);
        }
    }

    // Two 16-bit results, and their auxiliary values, packed in one register. A template because 8- and 32-bit outputs
    // have no packed pairs.
    template <class Half = Output>
    __device__ __forceinline__ u32 packed(float low, float high, const FilterPair& pair, u32 aux_values) const {
        const float2 two = HAS_AUX ? unpack_pair<Half>(aux_values) : make_float2(0.f, 0.f);
        const float2 results = values(make_float2(low, high), pair, two);
        return pack_pair<Half>(results.x, results.y);
    }

    // Stores filters `filter` (even) and `filter + 1` of the pixel at offset `at`.
    __device__ __forceinline__ void store_pair(float low, float high, int filter, long long at, Output* y) const {
        store_pair(low, high, of(filter), filter, at, y);
    }

    __device__ __forceinline__ void store_pair(float low, float high, const FilterPair& pair, int filter, long long at,
                                               Output* y) const {
        if (!FILTERS_ALIGNED && filter >= filters) return;
        at += filter;
        if constexpr (FILTERS_EVEN) {
            const float2 results = both(low, high, pair, at);
            store_two(y + at, results.x, results.y);
        } else {
            store_one(y + at, value(low, pair.bias.x, pair.scale.x, aux_one(at)));
            if (filter + 1 < filters) store_one(y + at + 1, value(high, pair.bias.y, pair.scale.y, aux_one(at + 1)));
        }
    }

    // Both results; their auxiliary values are at offset `at`.
    __device__ __forceinline__ float2 both(float low, float high, const FilterPair& pair, long long at) const {
        return values(make_float2(low, high), pair, aux_pair(at));
    }

private:
    template <class T>
    __device__ __forceinline__ float2 load_existing(const T* of_filters, int filter) const {
        if (FILTERS_ALIGNED || filter + 1 < filters) return load_two(of_filters + filter);
        return make_float2(filter < filters ? to_float(of_filters[filter]) : 0.f, 0.f);
    }

    __device__ __forceinline__ float aux_one(long long at) const {
        if constexpr (!HAS_AUX) return 0.f;
        else return to_float(residual[at]);
    }

    __device__ __forceinline__ float2 aux_pair(long long at) const {
        if constexpr (!HAS_AUX) return make_float2(0.f, 0.f);
        else return load_two(residual + at);
    }

    template <class Aux>
    __device__ __forceinline__ static float2 load_two(const Aux* from) {
        if constexpr (sizeof(Aux) == 1) {
            return unpack_bytes<Aux>(*reinterpret_cast<const u16*>(from));
        } else {
            const Pack<Aux, 2> pair = load_pack<Aux, 2>(from);
            return make_float2(to_float(pair.at[0]), to_float(pair.at[1]));
        }
    }

    __device__ __forceinline__ static void store_one(Output* to, float value) { *to = from_float<Output>(value); }

    template <class Result>
    __device__ __forceinline__ static void store_two(Result* to, float low, float high) {
        if constexpr (sizeof(Result) == 1) *reinterpret_cast<u16*>(to) = pack_bytes<Result>(low, high);
        else if constexpr (sizeof(Result) == 2) *reinterpret_cast<u32*>(to) = pack_pair<Result>(low, high);
        else *reinterpret_cast<float2*>(to) = make_float2(low, high);
    }
};

// Four adjacent filters of a convolution of 8-bit numbers. Without an expression, the reciprocal of the result's scale is
// part of the other scales. ReLU and saturation to s8 are then one instruction: results are computed in 128ths,
// saturated at 0 and 1.
template <class Result>
struct FourFilters {
    static constexpr bool IN_PARTS = HAS_RELU && is_integer<Result>();
    const Finish& finish;
    float scale[4], bias[4], residual_scale;

    __device__ __forceinline__ FourFilters(const Finish& finish, int filter) : finish(finish) {
        const float4 scales = *reinterpret_cast<const float4*>(finish.scale + filter);
        const float4 biases = HAS_BIAS ? *reinterpret_cast<const float4*>(finish.bias + filter) : make_float4(0, 0, 0, 0);
        scale[0] = scales.x, scale[1] = scales.y, scale[2] = scales.z, scale[3] = scales.w;
        bias[0] = biases.x, bias[1] = biases.y, bias[2] = biases.z, bias[3] = biases.w;
#ifndef EXPRESSION
        const float factor = finish.result_scale * (IN_PARTS ? 1.f / 128.f : 1.f);
        residual_scale = finish.residual_scale * factor;
#pragma unroll
        for (int e = 0; e < 4; ++e) scale[e] *= factor, bias[e] *= factor;
#endif
    }

    // Results of a pixel; `residuals` are a word of bytes. A template because only 8-bit elements come in such words.
    template <class Byte = Element>
    __device__ __forceinline__ Pack<u32, sizeof(Result)> finished(const float (&sums)[4], u32 residuals) const {
        float values[4], added[4] = {};
        if (HAS_RESIDUAL) to_floats(added, Pack<Byte, 4>{{residuals}});
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#ifdef EXPRESSION
            values[e] = finish.value(sums[e], bias[e], scale[e], added[e]);
#else
            values[e] = HAS_BIAS ? fmaf(sums[e], scale[e], bias[e]) : sums[e] * scale[e];
            if (HAS_RESIDUAL) values[e] = fmaf(added[e], residual_scale, values[e]);
            if (HAS_RELU) values[e] = IN_PARTS ? __saturatef(values[e]) : relu(values[e]);
#endif
        }
        if constexpr (IN_PARTS) {
            return {{s8x4_of_parts(values)}};
        } else if constexpr (sizeof(Result) == 2) {
            return {{pack_pair<Result>(values[0], values[1]), pack_pair<Result>(values[2], values[3])}};
        } else {
            Pack<Result, 4> pack;
            from_floats(pack, values);
            return {{pack.words[0]}};
        }
    }
};
