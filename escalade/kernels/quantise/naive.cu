// y[i] = x[i] * factor[0], rounded to nearest and saturated
//
// The foot of the ladder: one element per thread. Limiter: few bytes in flight, one small load per thread.
//
// Rung: `naive`.
#include "common/bytes.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
using Output = e4m3;   // problem.output
#endif

extern "C" __global__ void quantise_naive(const Element* x, const float* factor, Output* y, long long elements) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    y[at] = from_float<Output>(to_float(x[at]) * factor[0]);
}
