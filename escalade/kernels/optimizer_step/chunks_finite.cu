// not_finite = 1 if any element of any gradient is infinite or NaN
//
// The launch before a checked step, over the same chunks. It reads only the gradients, which the step then finds in L2
// if they fit. Limiter: memory, each gradient is read once.
//
// Rungs: `per_tensor`, `one_launch`, `vectorised`. Read chunks.cuh (table of tensors).
#include "optimizer_step/chunks.cuh"

template <class Gradient, int WIDTH, int COUNT>
__device__ __forceinline__ bool finite(const Gradient* gradient, int from, int end) {
    Pack<Gradient, WIDTH> packs[COUNT] = {};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int at = from + (i * THREADS + threadIdx.x) * WIDTH;
        if (at + WIDTH <= end) packs[i] = load_pack<Gradient, WIDTH>(gradient + at);
    }
    bool all = true;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            const float value = to_float(packs[i].at[e]);
            all &= value - value == 0.f;  // inf - inf is NaN too
        }
    return all;
}

template <class Gradient>
__device__ __forceinline__ bool all_finite(const Addresses& addresses, const Chunk& chunk) {
    const Gradient* gradient = static_cast<const Gradient*>(addresses.read[chunk.tensor][GRADIENT]) + chunk.begin;
    if (VECTOR > 1 && is_aligned(gradient)) {
        const int whole = chunk.count / VECTOR * VECTOR;
        return finite<Gradient, VECTOR, PACKS>(gradient, 0, whole) &&
               finite<Gradient, 1, 1>(gradient, whole, chunk.count);
    }
    bool all = true;
    for (int from = 0; from < chunk.count; from += THREADS * PACKS)
        all &= finite<Gradient, 1, PACKS>(gradient, from, chunk.count);
    return all;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    optimizer_step_chunks_finite(const __grid_constant__ Addresses addresses, const __grid_constant__ Chunks chunks,
                                 Meeting* meeting) {
    wait_for_previous_launch();
    const Chunk chunk(chunks);
    const bool all = is_wide(chunk) ? all_finite<float>(addresses, chunk) : all_finite<Gradient>(addresses, chunk);
    if (!all) atomicMax(&meeting->not_finite, 1u);
}
