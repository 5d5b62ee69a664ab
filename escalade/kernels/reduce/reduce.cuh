// State of a reduction to one number, by KIND: adding elements, merging two states, and the result. Expressions apply
// before an element and after the result: with EXPRESSION, one program of both, in[ELEMENT] to out[0] and in[TOTAL] to
// out[1]; the compiler drops the half that is not used. An argmax or argmin has the index of the element as result.
#pragma once

#include "common/moments.cuh"
#include "common/ptx.cuh"
#include "common/softmax.cuh"
#ifdef EXPRESSION
#include "common/expression.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;   // problem.dtype
constexpr int KIND = 0;  // ("sum", "mean", "max", "min", "var", "logsumexp", "argmax", "argmin").index(problem.kind)
#endif
#endif

constexpr int SUM = 0, MEAN = 1, MAX = 2, MIN = 3, VARIANCE = 4, LOGSUMEXP = 5, ARGMAX = 6, ARGMIN = 7;
constexpr bool IS_INDEX = KIND == ARGMAX || KIND == ARGMIN;
constexpr int NO_INDEX = 0x7fffffff;  // no element differs from the initial value: the first one is the result

template <bool OF_INDEX>
struct ResultOf {
    using Type = Element;
};
template <>
struct ResultOf<true> {
    using Type = long long;
};
using Result = ResultOf<IS_INDEX>::Type;

// Members of a state that its merges read; the others keep their initial values.
constexpr int MEMBERS = KIND == VARIANCE ? 3 : KIND == LOGSUMEXP || IS_INDEX ? 2 : 1;

struct State {
    float first = KIND == MAX || KIND == LOGSUMEXP || KIND == ARGMAX ? minus_infinity()
                  : KIND == MIN || KIND == ARGMIN                    ? -minus_infinity()
                                                                     : 0.f;
    // Squares of a variance, exponentials of a logsumexp, the bits of an argmax's index.
    float second = IS_INDEX ? __int_as_float(NO_INDEX) : 0.f;
    float count = 0.f;  // of a variance

    __device__ __forceinline__ float& member(int i) { return i == 0 ? first : i == 1 ? second : count; }
};

// NaN wins both max and min, as in PyTorch.
__device__ __forceinline__ float extreme(float a, float b) {
    return (KIND == MAX ? b > a : b < a) || b != b ? b : a;
}

// True if b replaces a, the first of equal ones. NaN wins both argmax and argmin; the first NaN stays.
__device__ __forceinline__ bool replaces(float b, float a) {
    return !(KIND == ARGMAX ? b <= a : b >= a) && a == a;
}

__device__ __forceinline__ State merged(const State& a, const State& b) {
    State both;
    if constexpr (KIND == SUM || KIND == MEAN) both.first = a.first + b.first;
    if constexpr (KIND == MAX || KIND == MIN) both.first = extreme(a.first, b.first);
    if constexpr (KIND == VARIANCE) {
        const Moments moments =
            merged(Moments{a.count, a.first, a.second}, Moments{b.count, b.first, b.second});
        both.count = moments.count, both.first = moments.mean, both.second = moments.squares;
    }
    if constexpr (KIND == LOGSUMEXP) {
        both.first = fmaxf(a.first, b.first);
        both.second = a.second * exp_below(a.first, both.first) + b.second * exp_below(b.first, both.first);
    }
    if constexpr (IS_INDEX) {
        const bool is_other = replaces(b.first, a.first);
        const bool is_tie = !is_other && !replaces(a.first, b.first);
        both = is_other || (is_tie && __float_as_int(b.second) < __float_as_int(a.second)) ? b : a;
    }
    return both;
}

// Adds COUNT elements, in fp32 after the expression. `index(i)` is the index of element i among the reduced ones; a
// thread adds its elements in ascending order.
template <int COUNT, class Index>
__device__ __forceinline__ void take(State& state, const float (&values)[COUNT], Index index) {
    if constexpr (KIND == VARIANCE) {
        float sum = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sum += values[i];
        const float mean = sum * (1.f / COUNT);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) squares += (values[i] - mean) * (values[i] - mean);
        State more;
        more.count = COUNT, more.first = mean, more.second = squares;
        state = merged(state, more);
    } else if constexpr (KIND == LOGSUMEXP) {
        SoftmaxSums sums;
        sums.largest = state.first, sums.sum = state.second;
        sums.add(values);
        state.first = sums.largest, state.second = sums.sum;
    } else if constexpr (IS_INDEX) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool is_other = replaces(values[i], state.first);
            state.first = is_other ? values[i] : state.first;
            state.second = is_other ? __int_as_float(index(i)) : state.second;
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            State one;
            one.first = values[i];
            state = merged(state, one);
        }
    }
}

#ifdef EXPRESSION
__device__ __forceinline__ float expressed(int input, int result, float value) {
    float in[EXPRESSION_INPUTS] = {}, out[EXPRESSION_RESULTS];
    in[input] = value;
    evaluate(out, in);
    return out[result];
}
__device__ __forceinline__ float element_of(float value) { return expressed(ELEMENT, 0, value); }
__device__ __forceinline__ float result_of(float total) { return expressed(TOTAL, 1, total); }
#else
__device__ __forceinline__ float element_of(float value) { return value; }
__device__ __forceinline__ float result_of(float total) { return total; }
#endif

// `divisor` is the number of elements, minus the correction of a variance.
__device__ __forceinline__ Result finished(const State& state, float divisor) {
    if constexpr (IS_INDEX) {
        const int index = __float_as_int(state.second);
        return index == NO_INDEX ? 0 : index;
    } else {
        float total = state.first;
        if constexpr (KIND == MEAN) total = state.first / divisor;
        if constexpr (KIND == VARIANCE) total = state.second / divisor;
        if constexpr (KIND == LOGSUMEXP) total = state.first + logf(state.second);
        return from_float<Element>(result_of(total));
    }
}

__device__ __forceinline__ State shuffled_down(State state, int distance) {
    State other;
#pragma unroll
    for (int i = 0; i < MEMBERS; ++i) other.member(i) = __shfl_down_sync(ALL_LANES, state.member(i), distance);
    return other;
}
