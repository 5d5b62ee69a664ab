// y[n][c][p] = relu((x[n][c][p] - mean[c]) * weight[c] / sqrt(variance[c] + epsilon) + bias[c] + residual[n][c][p])
// (NCHW)
//
// 16 bytes per access over the whole array, with PACKS in flight per thread. A pack is in one plane or, if STRADDLING,
// extends into the next, that of the next channel: a plane has at least VECTOR elements. A warp is mostly in one plane,
// so its channel's values are one cached load for all lanes. Limiter: memory. A thread reads everything before it
// writes, so y may be x or the residual.
//
// Rung: `vectorised`, also of `batch_norm_training`. Read batch_norm.cuh.
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;              // problem.dtype
constexpr int VECTOR = 4;           // vector: elements per access
constexpr int PACKS = 4;            // config.packs: accesses in flight per thread
constexpr int THREADS = 256;        // config.threads
constexpr bool STRADDLING = false;  // problem.pixels % vector != 0: a pack may span two planes
#endif

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
        int left = VECTOR;  // elements of the pack in this plane
        Line next = line;
        if (STRADDLING) {
            const int rest = plane - static_cast<int>(at - in_plane * plane);
            if (rest < VECTOR) left = rest, next = all.line(c + 1 < channels ? c + 1 : 0);
        }
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const Line& of = !STRADDLING || e < left ? line : next;
            values[i].at[e] = normalized(values[i].at[e], of.mean, of.scale, of.bias, others[i].at[e]);
        }
        store_pack(y + pack * VECTOR, values[i]);
    }

    const long long last = packs.whole * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && last < elements) {
        const Line line = all.line(channel_of(static_cast<Index>(last), channels, plane));
        y[last] = normalized(x[last], line.mean, line.scale, line.bias, HAS_RESIDUAL ? residual[last] : Element());
    }
}
