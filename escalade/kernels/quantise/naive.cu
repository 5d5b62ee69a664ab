// y[i] = e4m3(x[i] * factor[0])
//
// The foot of the ladder: one element per thread. Limiter: few bytes in flight, one small load per thread.
//
// Rung: `naive`.
#include "common/e4m3.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
#endif

extern "C" __global__ void quantise_naive(const Element* x, const float* factor, e4m3* y, long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    y[at] = from_float<e4m3>(to_float(x[at]) * factor[0]);
}
