// y[row][class] = activated(exp(x[row][class] - largest) / sum over classes of exp(x[row][class] - largest)),
// or with LOG activated(its logarithm)
//
// One warp per row: lanes read adjacent elements, keep the max and the sum together in one pass, and merge by shuffles;
// a second pass writes. Limiter: memory, one element per load, each twice.
//
// Rung: `warp_per_row`. Read softmax.cuh.
#include "common/ptx.cuh"
#include "softmax/softmax.cuh"

extern "C" __global__ void softmax_warp_per_row(const Element* x, Element* y, int rows, int classes) {
    wait_for_previous_launch();
    const int lane = threadIdx.x % 32;
    const long long row = 1LL * blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const Element* logits = x + row * classes;
    SoftmaxSums sums;
    for (int c = lane; c < classes; c += 32) {
        const float logit[1] = {to_float(logits[c])};
        sums.add(logit);
    }
    sums.merge_warp();
    const float divisor = sums.divisor<LOG>();
    for (int c = lane; c < classes; c += 32) {
        const float term = softmax_term<LOG>(to_float(logits[c]), sums.largest);
        y[row * classes + c] = finished(term, divisor);
    }
}
