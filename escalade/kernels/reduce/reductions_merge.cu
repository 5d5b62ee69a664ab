// y[result] = finished(over splits: partial[split][result])
//
// The second of two launches. LANES threads a result, always in the same order, so that every run gives the same bits.
// What bounds it: latency.
//
// Serves `rows` and `columns`. reduce.cuh has what is kept of elements.
#include "reduce/reduce.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_reductions_merge(const State* partial, Element* y, long long results, int splits, float divisor) {
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
