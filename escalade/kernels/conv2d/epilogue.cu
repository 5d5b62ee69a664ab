// y[pixel][filter] = relu(sum over parts of sums[part][pixel][filter] + bias[filter] + residual[pixel][filter])  (NHWC)
//
// What a product that stops at its sums leaves to do; `sums` may be y itself. VECTOR outputs a thread, VECTOR a
// divisor of the filters. What bounds it: memory, every output read and written once more.
#include "common/epilogue.cuh"

extern "C" __global__ void conv2d_epilogue(const Sum* sums, const Element* bias, const Element* residual, Element* y,
                                           int filters, long long outputs) {
    const long long at = (1LL * blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    if (at >= outputs) return;

    float totals[VECTOR] = {};
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const Pack<Sum, VECTOR> pack = load_pack<Sum, VECTOR>(sums + part * outputs + at);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) totals[e] += to_float(pack.at[e]);
    }
    Pack<Element, VECTOR> old = {}, results;
    if (HAS_RESIDUAL) old = load_pack<Element, VECTOR>(residual + at);
    const int filter = at % filters;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
        results.at[e] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(totals[e], bias, filter + e, old.at, e);
    store_pack(y + at, results);
}
