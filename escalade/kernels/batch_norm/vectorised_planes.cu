// y[n][c][p] = relu((x[n][c][p] - mean[c]) * weight[c] / sqrt(variance[c] + epsilon) + bias[c] + residual[n][c][p])  (NCHW)
//
// 16 bytes an access over the whole array, and PACKS of them under way in a thread. A pack lies in one plane, or, where
// STRADDLING, runs over into the next one, which is the next channel's: a plane has at least VECTOR elements. A warp
// mostly stands in one plane, so that the numbers of its channel are one cached load for all lanes. What bounds it:
// memory. A thread has read all that it writes, so y may be x or the residual.
//
// Serves `vectorised`, and `batch_norm_training`. batch_norm.cuh has what becomes of an element.
#include "batch_norm/batch_norm.cuh"
#include "common/packs.cuh"

struct Line {
    float mean, scale, bias;
};

struct Channels {
    const float *weight, *bias, *mean, *variance;
    float epsilon;

    __device__ __forceinline__ Line line(int c) const {
        return {mean[c], weight[c] * rsqrtf(variance[c] + epsilon), bias[c]};
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_vectorised_planes(const Element* x, const float* __restrict__ weight, const float* __restrict__ bias,
                                 const float* __restrict__ mean, const float* __restrict__ variance,
                                 const Element* residual, Element* y, float epsilon, int channels, int plane,
                                 long long elements) {
    wait_for_previous_launch();
    const Channels all{weight, bias, mean, variance, epsilon};
    const Packs packs(elements);
    Values values[PACKS], others[PACKS] = {};
    packs.load(values, others, x, residual);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = packs.first + i * THREADS;
        if (pack >= packs.whole) continue;
        const Index at = static_cast<Index>(pack * VECTOR), in_plane = at / plane;
        const int c = static_cast<int>(in_plane % channels);
        const Line line = all.line(c);
        int left = VECTOR;  // elements of the pack that are still of this plane
        Line next = line;
        if (STRADDLING) {
            const int rest = plane - static_cast<int>(at - in_plane * plane);
            if (rest < VECTOR) left = rest, next = all.line(c + 1 < channels ? c + 1 : 0);
        }
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const Line& of = !STRADDLING || e < left ? line : next;
            values[i].at[e] = normalised(values[i].at[e], of.mean, of.scale, of.bias, others[i].at[e]);
        }
        store_pack(y + pack * VECTOR, values[i]);
    }

    const long long last = packs.whole * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && last < elements) {
        const Line line = all.line(channel_of(static_cast<Index>(last), channels, plane));
        y[last] = normalised(x[last], line.mean, line.scale, line.bias, HAS_RESIDUAL ? residual[last] : Element());
    }
}
