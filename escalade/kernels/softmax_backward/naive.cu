// dx[row][class] of a softmax (see softmax_backward.cuh); classes `inner` apart
//
// The foot of the ladder: one thread per row, in two passes: the sum, the results. Limiter: with contiguous rows the
// threads of a warp read 32 rows at once, so every load takes 32 sectors for 32 elements.
//
// Rung: `naive`. Read softmax_backward.cuh.
#include "softmax_backward/softmax_backward.cuh"

extern "C" __global__ void softmax_backward_naive(const Gradient* gradient, const Element* softmax, Result* y, int rows,
                                                  int classes, int inner) {
    wait_for_previous_launch();
    const long long row = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= 1LL * rows * inner) return;
    const long long first = row / inner * classes * inner + row % inner;
    float sum = 0.f;
    for (int c = 0; c < classes; ++c) {
        const long long at = first + 1LL * c * inner;
        sum += row_term(gradient[at], softmax[at]);
    }
    for (int c = 0; c < classes; ++c) {
        const long long at = first + 1LL * c * inner;
        y[at] = dx_of(gradient[at], softmax[at], sum);
    }
}
