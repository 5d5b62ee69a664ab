// y[result] = finished(over splits: partial[split][result])
//
// Second of two launches. LANES threads per result, in a fixed order, so that every run gives the same bits. Limiter:
// latency.
//
// Rungs: `rows`, `columns`. Read reduce.cuh (state of a reduction).
#include "reduce/reduce.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int THREADS = 128;  // threads
constexpr int LANES = 32;     // lanes: lanes per result
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_reductions_merge(const State* partial, Result* y, long long results, int splits, float divisor) {
    wait_for_previous_launch();
    const long long result = 1LL * blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    State state;
    if (result < results)
        for (int split = lane; split < splits; split += LANES) state = merged(state, partial[split * results + result]);
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) state = merged(state, shuffled_down(state, distance));
    if (lane == 0 && result < results) y[result] = finished(state, divisor);
}
