// p, state = expression(p, g, state, scalars, step) for each element of each tensor, in place or not
//
// A CTA has a chunk of one tensor, found by binary search over the chunks' starts. A thread has PACKS packs of VECTOR
// elements of every array in flight before the first is used, 16 bytes each in fp32; an unaligned tensor, such as a
// view into a bucket of gradients, is processed element by element. Scalars are read from memory, so that a CUDA graph
// can be replayed with others; `step` is the number of steps so far plus one. What depends on these alone (ONCE) is
// computed once per thread, the rest (EXPRESSION) per element. A step whose gradients are not all finite (checked by
// chunks_finite.cu) writes only its count. Limiter: memory, each array is read and written once.
//
// The last CTA to finish, by ticket, counts the step: all others have read the count by then.
//
// Rung          switches
//   per_tensor  TENSORS 1, one launch each, VECTOR 1
//   one_launch  all TENSORS, VECTOR 1
//   vectorised  all TENSORS, VECTOR 4
// Read chunks.cuh (table of tensors).
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Copy = __half;             // problem.copy or "fp32"
constexpr bool CHECKED = false;  // problem.checked
constexpr bool COUNTS = true;    // counts: the launch that counts the step
#endif

#include "common/expression.cuh"
#include "optimizer_step/chunks.cuh"

struct Uniform {  // the same for every element
    float at[UNIFORMS];
};

__device__ __forceinline__ Uniform computed_once(const float* scalars, float step) {
    Uniform uniform;
    ONCE
    return uniform;
}

// COUNT packs of WIDTH elements from element `from` of the chunk on, bounded by `end`.
template <class Gradient, int WIDTH, int COUNT>
__device__ __forceinline__ void update(const Addresses& addresses, const Chunk& chunk, int from, int end,
                                       const float* scalars, float step) {
    Pack<float, WIDTH> values[COUNT][READ];
    Pack<Gradient, WIDTH> gradient[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int at = from + (i * THREADS + threadIdx.x) * WIDTH;
        if (at + WIDTH > end) continue;
#pragma unroll
        for (int array = 0; array < READ; ++array) {
            const void* source = addresses.read[chunk.tensor][array];
            if (array == GRADIENT)
                gradient[i] = load_pack<Gradient, WIDTH>(static_cast<const Gradient*>(source) + chunk.begin + at);
            else
                values[i][array] = load_pack<float, WIDTH>(static_cast<const float*>(source) + chunk.begin + at);
        }
    }
    const Uniform uniform = computed_once(scalars, step);  // while the loads are in flight
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int at = from + (i * THREADS + threadIdx.x) * WIDTH;
        if (at + WIDTH > end) continue;
        Pack<float, WIDTH> results[EXPRESSION_RESULTS];
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            float array[READ];
#pragma unroll
            for (int a = 0; a < READ; ++a) array[a] = a == GRADIENT ? to_float(gradient[i].at[e]) : values[i][a].at[e];
            const float in[EXPRESSION_INPUTS] = {INPUTS};
            float out[EXPRESSION_RESULTS];
            evaluate(out, in);
#pragma unroll
            for (int r = 0; r < EXPRESSION_RESULTS; ++r) results[r].at[e] = out[r];
        }
#pragma unroll
        for (int r = 0; r < EXPRESSION_RESULTS; ++r)
            store_pack(static_cast<float*>(addresses.written[chunk.tensor][r]) + chunk.begin + at, results[r]);
        if constexpr (HAS_COPY) {
            Pack<Copy, WIDTH> copy;
            from_floats(copy, results[0].at);
            store_pack(static_cast<Copy*>(addresses.written[chunk.tensor][WRITTEN - 1]) + chunk.begin + at, copy);
        }
    }
}

template <class Gradient>
__device__ __forceinline__ void update_all(const Addresses& addresses, const Chunk& chunk, bool aligned,
                                           const float* scalars, float step) {
    if (VECTOR > 1 && aligned) {
        const int whole = chunk.count / VECTOR * VECTOR;
        update<Gradient, VECTOR, PACKS>(addresses, chunk, 0, whole, scalars, step);
        if (whole < chunk.count) update<Gradient, 1, 1>(addresses, chunk, whole, chunk.count, scalars, step);
    } else {
#pragma unroll 1
        for (int from = 0; from < chunk.count; from += THREADS * PACKS)
            update<Gradient, 1, PACKS>(addresses, chunk, from, chunk.count, scalars, step);
    }
}

__device__ __forceinline__ bool all_aligned(const Addresses& addresses, int tensor) {
    bool aligned = true;
#pragma unroll
    for (int array = 0; array < READ; ++array) aligned &= is_aligned(addresses.read[tensor][array]);
#pragma unroll
    for (int array = 0; array < WRITTEN; ++array) aligned &= is_aligned(addresses.written[tensor][array]);
    return aligned;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    optimizer_step_chunks(const __grid_constant__ Addresses addresses, const __grid_constant__ Chunks chunks,
                          const float* scalars, const float* counts, float* counted, Meeting* meeting) {
    wait_for_previous_launch();
    const float taken = counts[0], skipped = counts[1];
    const bool skips = CHECKED && meeting->not_finite != 0;
    if (!skips) {
        const Chunk chunk(chunks);
        const float step = taken + 1.f;
        const bool aligned = all_aligned(addresses, chunk.tensor);
        if (is_wide(chunk)) update_all<float>(addresses, chunk, aligned, scalars, step);
        else update_all<Gradient>(addresses, chunk, aligned, scalars, step);
    }
    if (!COUNTS) return;
    __syncthreads();  // the CTA has read the counts
    if (threadIdx.x == 0 && take_ticket(&meeting->tickets, gridDim.x) == gridDim.x - 1) {
        counted[0] = taken + (skips ? 0.f : 1.f);
        counted[1] = skipped + (skips ? 1.f : 0.f);
        counted[2] = skips ? 1.f : 0.f;
        if (CHECKED) meeting->not_finite = 0;
    }
}
