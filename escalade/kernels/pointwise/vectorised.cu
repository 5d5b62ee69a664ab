// out[i] = expression(in[i], …), inputs broadcast
//
// 16 bytes per access, with PACKS of each input in flight per thread before the first is used. A pack's position is
// computed once, by multiplications instead of divisions; an input that is constant along it is one load, and one that
// is not dense is read from cache, where adjacent threads have brought it. Limiter: memory, each element is read and
// written once. A thread reads everything before it writes, so a result may alias a dense input.
//
// Rung: `vectorised` of every pointwise operation. Read pointwise.cuh (tensor declarations).
#include "pointwise/pointwise.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;     // vector: elements per access
constexpr int PACKS = 4;      // config.packs: accesses in flight per thread
constexpr int THREADS = 256;  // config.threads
#endif

template <class T>
using Values = Pack<T, VECTOR>;

// Contiguous elements, at most 16 bytes per load: no more alignment is guaranteed.
template <class T>
__device__ __forceinline__ Values<T> neighbours(const T* from) {
    constexpr int TOGETHER = VECTOR * sizeof(T) > 16 ? 16 / sizeof(T) : VECTOR;
    Values<T> values;
#pragma unroll
    for (int e = 0; e < VECTOR; e += TOGETHER) {
        const Pack<T, TOGETHER> pack = load_pack<T, TOGETHER>(from + e);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) values.at[e + i] = pack.at[i];
    }
    return values;
}

template <class T>
__device__ __forceinline__ T element(const T* from, int access, const Walk& walk, const int (&stride)[RANK],
                                     long long at) {
    return from[access == DENSE ? at : Place(walk, static_cast<unsigned>(at)).offset(stride, 1)];
}

template <int ACCESS, class T>
__device__ __forceinline__ Values<T> load(const T* from, const Walk& walk, const int (&stride)[RANK], long long pack) {
    if (ACCESS == DENSE) return neighbours(from + pack * VECTOR);
    Values<T> values;
    if (ACCESS == EACH) {  // a pack may span several rows
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) values.at[e] = element(from, EACH, walk, stride, pack * VECTOR + e);
        return values;
    }
    from += Place(walk, static_cast<unsigned>(pack)).offset(stride, VECTOR);
    if (ACCESS == ALONG) return neighbours(from);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) values.at[e] = from[ACCESS == SAME ? 0 : 1LL * e * stride[RANK - 1]];
    return values;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pointwise_vectorised(PARAMETERS, const Walk walk, long long elements) {
    wait_for_previous_launch();
    const long long whole = elements / VECTOR;  // packs; CTA 0 handles the remaining elements
    const long long first = 1LL * blockIdx.x * (THREADS * PACKS) + threadIdx.x;
#define INPUT(number, access) Values<In##number> read##number[PACKS];
    INPUTS
#undef INPUT
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = first + i * THREADS;
        if (pack >= whole) continue;
#define INPUT(number, access) read##number[i] = load<access>(in##number, walk, walk.stride[number], pack);
        INPUTS
#undef INPUT
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = first + i * THREADS;
        if (pack >= whole) continue;
#define RESULT(number) Values<Out##number> made##number;
        RESULTS
#undef RESULT
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
#define INPUT(number, access) to_float(read##number[i].at[e]),
            const float in[EXPRESSION_INPUTS] = {INPUTS};
#undef INPUT
            float out[EXPRESSION_RESULTS];
            evaluate(out, in);
#define RESULT(number) made##number.at[e] = from_float<Out##number>(out[number]);
            RESULTS
#undef RESULT
        }
#define RESULT(number) store_pack(out##number + pack * VECTOR, made##number);
        RESULTS
#undef RESULT
    }

    const long long last = whole * VECTOR + threadIdx.x;
    if (blockIdx.x != 0 || last >= elements) return;
#define INPUT(number, access) to_float(element(in##number, access, walk, walk.stride[number], last)),
    const float in[EXPRESSION_INPUTS] = {INPUTS};
#undef INPUT
    float out[EXPRESSION_RESULTS];
    evaluate(out, in);
#define RESULT(number) out##number[last] = from_float<Out##number>(out[number]);
    RESULTS
#undef RESULT
}
