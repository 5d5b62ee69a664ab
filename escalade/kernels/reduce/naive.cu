// y[o][i] = finished(over r: x[o][r][i])
//
// The foot of the ladder: one thread per result. Limiter: latency, one element at a time; if rows are reduced, the
// threads of a warp read 32 of them at once.
//
// Rung: `naive`. Read reduce.cuh (state of a reduction).
#include "reduce/reduce.cuh"

// Elements to a partial result. A running sum of a million squares is 2^24 times some of them: rounding drops those.
constexpr int PART = 1024;

extern "C" __global__ void reduce_naive(const Element* x, Result* y, long long results, int reduced, int inner,
                                        float divisor) {
    wait_for_previous_launch();
    const long long result = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (result >= results) return;
    const long long outer = result / inner;
    const Element* from = x + outer * reduced * inner + (result - outer * inner);
    State state;
    for (int r = 0; r < reduced;) {
        State part;
        for (const int end = min(r + PART, reduced); r < end; ++r) {
            const float value[1] = {element_of(to_float(from[1LL * r * inner]))};
            take(part, value, [&](int) { return r; });
        }
        state = merged(state, part);
    }
    y[result] = finished(state, divisor);
}
