// y[row] = the K largest of softmax(x[row]), largest first, and then their K classes
//
// One warp per row, read once: each lane keeps its best K, with the largest logit and the sum; then K rounds select the
// best head of the 32 lists. Limiter: instructions, mostly to maintain the lists.
//
// Rung: `warp_per_row`. Read ranking.cuh (order of the classes).
#include "top_k/ranking.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;  // problem.dtype
constexpr int K = 5;    // problem.k
#endif

extern "C" __global__ void top_k_warp_per_row(const Element* x, float* y, int rows, int classes) {
    wait_for_previous_launch();
    const int lane = threadIdx.x % 32;
    const long long row = 1LL * blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const Element* logits = x + row * classes;
    Best best;
    SoftmaxSums sums;
    for (int c = lane; c < classes; c += 32) {
        const float logit[1] = {to_float(logits[c])};
        best.add(entry_of(logit[0], c));
        sums.add(logit);
    }
    sums.merge_warp();
    const u64 mine = best.over_warp();
    if (lane < K) store_entry(y + row * 2 * K, lane, mine, sums.largest, sums.scale());
}
