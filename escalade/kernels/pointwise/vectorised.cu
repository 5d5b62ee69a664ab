// y[i] = clip(x[i] + residual[i])
//
// 16 bytes an access, and PACKS of them under way in a thread before the first is used. What bounds it: memory, each
// element read and written once. A thread has read all that it writes, so y may be x or the residual.
#include "common/ptx.cuh"
#include "pointwise/pointwise.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    pointwise_vectorised(const Element* x, const Element* residual, Element* y, float limit, long long elements) {
    wait_for_previous_launch();
    const long long whole = elements / VECTOR;  // packs; the few elements behind them are the first block's
    const long long first = 1LL * blockIdx.x * (THREADS * PACKS) + threadIdx.x;

    Pack<Element, VECTOR> values[PACKS], others[PACKS] = {};
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = first + i * THREADS;
        if (pack >= whole) continue;
        values[i] = load_pack<Element, VECTOR>(x + pack * VECTOR);
        if (HAS_RESIDUAL) others[i] = load_pack<Element, VECTOR>(residual + pack * VECTOR);
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = first + i * THREADS;
        if (pack >= whole) continue;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) values[i].at[e] = pointwise(values[i].at[e], others[i].at[e], limit);
        store_pack(y + pack * VECTOR, values[i]);
    }

    const long long last = whole * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && last < elements)
        y[last] = pointwise(x[last], HAS_RESIDUAL ? residual[last] : Element(), limit);
}
