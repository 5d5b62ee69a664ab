// y[pixel][filter] = relu(y[pixel][filter] + bias[filter] + residual[pixel][filter])      (NHWC)
//
// Epilogue of a GEMM that stores plain sums. VECTOR outputs per thread; VECTOR divides the filters.
// Limiter: memory, every output is read and written once more.
//
// Rungs: `tensor_core`, `half_storage`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr int VECTOR = 1;             // vector
constexpr bool HAS_BIAS = true;       // problem.bias
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr bool HAS_RELU = false;      // problem.relu
#endif

#include "common/epilogue.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void conv2d_tensor_core_epilogue(const Element* bias, const Element* residual, Element* y, int filters,
                                           long long outputs) {
    wait_for_previous_launch();
    const long long at = (1LL * blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    if (at >= outputs) return;

    const Pack<Element, VECTOR> sums = load_pack<Element, VECTOR>(y + at);
    Pack<Element, VECTOR> old = {}, results;
    if (HAS_RESIDUAL) old = load_pack<Element, VECTOR>(residual + at);
    const int filter = at % filters;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
        results.at[e] =
            finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(to_float(sums.at[e]), bias, filter + e, old.at, e);
    store_pack(y + at, results);
}
