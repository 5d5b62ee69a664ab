// y[i] = clip(x[i] + residual[i])
//
// 16 bytes an access, and PACKS of them under way in a thread before the first is used. What bounds it: memory, each
// element read and written once. A thread has read all that it writes, so y may be x or the residual.
//
// Serves `vectorised` of relu (HAS_RELU, HAS_LIMIT) and of add (HAS_RESIDUAL). pointwise.cuh has what becomes of an
// element.
#include "common/packs.cuh"
#include "pointwise/pointwise.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    pointwise_vectorised(const Element* x, const Element* residual, Element* y, float limit, long long elements) {
    wait_for_previous_launch();
    const Packs packs(elements);
    Values values[PACKS], others[PACKS] = {};
    packs.load(values, others, x, residual);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = packs.first + i * THREADS;
        if (pack >= packs.whole) continue;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) values[i].at[e] = pointwise(values[i].at[e], others[i].at[e], limit);
        store_pack(y + pack * VECTOR, values[i]);
    }

    const long long last = packs.whole * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && last < elements)
        y[last] = pointwise(x[last], HAS_RESIDUAL ? residual[last] : Element(), limit);
}
