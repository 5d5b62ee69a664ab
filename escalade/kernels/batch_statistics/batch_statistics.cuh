// Results per channel of batch_statistics: mean and variance, and what training needs.
#pragma once

// Null if not requested. `moved_mean` and `moved_variance` may alias the running ones.
struct Results {
    float *mean, *rstd;
    const float *running_mean, *running_variance;
    float *moved_mean, *moved_variance;
    float* variance;
};

// `squares` is the sum of squared deviations. Running variances move toward the unbiased variance, with count - 1.
__device__ __forceinline__ void store_training_statistics(const Results& to, int c, float mean, float squares,
                                                          float count, float epsilon, float momentum) {
    if (to.rstd != nullptr) to.mean[c] = mean, to.rstd[c] = rsqrtf(squares / count + epsilon);
    if (to.variance != nullptr) to.variance[c] = squares / count;
    if (to.moved_mean == nullptr) return;
    const float before = to.running_mean[c], variance_before = to.running_variance[c];
    to.moved_mean[c] = before + momentum * (mean - before);
    to.moved_variance[c] = variance_before + momentum * (squares / (count - 1.f) - variance_before);
}

__device__ __forceinline__ void store_statistics(float* y, const Results& to, int c, int channels, float mean,
                                                 float squares, float count, float epsilon, float momentum) {
    if (y != nullptr) y[c] = mean, y[channels + c] = squares / count;
    store_training_statistics(to, c, mean, squares, count, epsilon, momentum);
}
