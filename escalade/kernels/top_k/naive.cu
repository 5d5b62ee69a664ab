// y[row] = the K largest of softmax(x[row]), largest first, and then their K classes
//
// The foot of the ladder: one thread per row, with one pass for the largest logit and the best K, and another for the
// sum. Limiter: loads of 32 sectors for 32 elements, and few rows give few threads.
//
// Rung: `naive`. Read ranking.cuh (order of the classes).
#include "top_k/ranking.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
constexpr int K = 5;    // problem.k
#endif

extern "C" __global__ void top_k_naive(const Element* x, float* y, int rows, int classes) {
    wait_for_previous_launch();
    const long long row = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const Element* logits = x + row * classes;
    Best best;
    SoftmaxSums sums;
    for (int c = 0; c < classes; ++c) {
        const float logit = to_float(logits[c]);
        best.add(entry_of(logit, c));
        sums.largest = fmaxf(sums.largest, logit);
    }
    for (int c = 0; c < classes; ++c) sums.sum += expf(to_float(logits[c]) - sums.largest);
#pragma unroll
    for (int i = 0; i < K; ++i) store_entry(y + row * 2 * K, i, best.entries[i], sums.largest, sums.scale());
}
