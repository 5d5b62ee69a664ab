// loss[n] = -log of the probability that x, log-probabilities [step][sequence][class], spells target n with blanks
// between its labels, and y = its gradient by x
//
// States are the labels with a blank before, between and behind them. alpha[t][s] and beta[t][s] are the logarithms of the
// probabilities of all ways to state s at step t, and from it. Then
//
//     y[t][n][c] = exp(x[t][n][c]) - sum over states s of class c of exp(alpha[t][s] + beta[t][s] - x[t][n][c] + loss[n])
//
// The foot of the ladder: one CTA per sequence, one thread per state, one barrier per step. Limiter: the latency of a step,
// of loads from L1 and L2 and three exponentials in a row.
#include "common/ptx.cuh"
#include "common/softmax.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int BLANK = 0;                // problem.blank
constexpr bool ZERO_INFINITY = false;  // problem.zero_infinity: targets that no path spells have loss 0
#endif

__device__ __forceinline__ float log_sum(float a, float b, float c) {
    const float largest = fmaxf(fmaxf(a, b), c);
    if (largest == minus_infinity()) return a + b + c;  // a NaN among them stays
    return largest + logf(expf(a - largest) + expf(b - largest) + expf(c - largest));
}

struct States {
    const long long* target;
    int count, classes;

    // Returns -1 for a label that is no class: the loss is NaN then.
    __device__ __forceinline__ int label(int state) const {
        if (state % 2 == 0) return BLANK;
        const long long found = target[state / 2];
        return found >= 0 && found < classes ? static_cast<int>(found) : -1;
    }

    // True if a path may skip the blank between this state and the one `before`.
    __device__ __forceinline__ bool skips(int before, int state) const {
        return before >= 0 && state < count && state % 2 == 1 && label(before) != label(state);
    }
};

__device__ __forceinline__ float at(const float* row, int label) { return label < 0 ? __int_as_float(0x7FFFFFFF) : row[label]; }

extern "C" __global__ void ctc_loss_naive(
    const float* x, const long long* targets, const long long* input_lengths, const long long* target_lengths, float* y,
    float* loss, float* alphas, float* betas, int steps, int batch, int classes, int labels
) {
    wait_for_previous_launch();
    const int sequence = blockIdx.x;
    const int width = 2 * labels + 1;
    const int length = static_cast<int>(min(max(target_lengths[sequence], 0LL), 1LL * labels));
    const int used = static_cast<int>(min(max(input_lengths[sequence], 0LL), 1LL * steps));
    const States states{targets + 1LL * sequence * labels, 2 * length + 1, classes};
    float* alpha = alphas + 1LL * sequence * steps * width;
    float* beta = betas + 2LL * sequence * width;
    const auto row = [&](int step) { return (1LL * step * batch + sequence) * classes; };

    for (int step = 0; step < used; ++step) {
        const float* before = alpha + 1LL * (step - 1) * width;
        for (int state = threadIdx.x; state < states.count; state += blockDim.x) {
            const float own = at(x + row(step), states.label(state));
            float ways = state < 2 ? 0.f : minus_infinity();
            if (step > 0)
                ways = log_sum(
                    before[state], state > 0 ? before[state - 1] : minus_infinity(),
                    states.skips(state - 2, state) ? before[state - 2] : minus_infinity()
                );
            alpha[1LL * step * width + state] = ways + own;
        }
        __syncthreads();
    }

    float cost = length == 0 ? 0.f : -minus_infinity();
    if (used > 0) {
        const float* last = alpha + 1LL * (used - 1) * width + states.count - 1;
        cost = -log_sum(last[0], length > 0 ? last[-1] : minus_infinity(), minus_infinity());
    }
    const bool ignored = ZERO_INFINITY && cost == -minus_infinity();
    if (threadIdx.x == 0) loss[sequence] = ignored ? 0.f : cost;

    for (int step = steps - 1; step >= 0; --step) {
        float* gradient = y + row(step);
        const bool counts = step < used && !ignored;
        for (int c = threadIdx.x; c < classes; c += blockDim.x)
            gradient[c] = counts ? expf(x[row(step) + c]) : 0.f;
        if (!counts) continue;
        float* now = beta + step % 2 * width;
        const float* next = beta + (step + 1) % 2 * width;
        for (int state = threadIdx.x; state < states.count; state += blockDim.x) {
            float ways = state + 2 < states.count ? minus_infinity() : 0.f;
            if (step + 1 < used)
                ways = log_sum(
                    next[state], state + 1 < states.count ? next[state + 1] : minus_infinity(),
                    states.skips(state, state + 2) ? next[state + 2] : minus_infinity()
                );
            now[state] = ways + at(x + row(step), states.label(state));
        }
        __syncthreads();
        for (int state = threadIdx.x; state < states.count; state += blockDim.x) {
            const int label = states.label(state);
            if (label < 0) continue;
            const float ways = alpha[1LL * step * width + state] + now[state];
            atomicAdd(gradient + label, -expf(ways - x[row(step) + label] + cost));
        }
    }
}
