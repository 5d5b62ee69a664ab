// y[row][class] = activated(exp(x[row][class] - largest) / sum over classes of exp(x[row][class] - largest)),
// or with LOG activated(its logarithm)
//
// The foot of the ladder: one thread per row, in three passes: the largest, the sum, the results. Limiter: the threads
// of a warp read 32 rows at once, so every load takes 32 sectors for 32 elements, and few rows give few threads.
//
// Rung: `naive`. Read softmax.cuh.
#include "common/ptx.cuh"
#include "softmax/softmax.cuh"

extern "C" __global__ void softmax_naive(const Element* x, Element* y, int rows, int classes) {
    wait_for_previous_launch();
    const long long row = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const Element* logits = x + row * classes;
    SoftmaxSums sums;
    for (int c = 0; c < classes; ++c) sums.largest = fmaxf(sums.largest, to_float(logits[c]));
    for (int c = 0; c < classes; ++c) sums.sum += expf(to_float(logits[c]) - sums.largest);
    const float divisor = sums.divisor<LOG>();
    for (int c = 0; c < classes; ++c) {
        const float term = softmax_term<LOG>(to_float(logits[c]), sums.largest);
        y[row * classes + c] = finished(term, divisor);
    }
}
