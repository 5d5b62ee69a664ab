// y[n][c][p] = weight[c] * rstd[c] * (g - mean of g - (x - mean[c]) * rstd[c] * mean of g * (x - mean[c]) * rstd[c])
//
// NCHW; g is the gradient before the ReLU, if any. Last of three launches. VECTOR elements per access over the whole
// array, with PACKS in flight per thread. A pack is in one plane or, if STRADDLING, extends into the next, that of the
// next channel: a plane has at least VECTOR elements. A warp is mostly in one plane, so its channel's values are one
// cached load for all lanes. Limiter: memory. A thread reads everything before it writes, so y may be the gradient or
// x.
//
// Rung          switches
//   split       VECTOR 1, PACKS 1
//   vectorised  VECTOR 16 bytes, several PACKS
// Read batch_norm_backward.cuh.
#include "batch_norm_backward/batch_norm_backward.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;              // problem.dtype
constexpr int VECTOR = 4;           // vector: elements per access
constexpr int PACKS = 4;            // packs: accesses per thread
constexpr int THREADS = 256;        // config.threads
constexpr bool STRADDLING = false;  // problem.pixels % vector != 0: a pack may span two planes
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_backward_split_apply_planes(const Element* gradient, const Element* x, const Element* output,
                                           Channels all, Element* y, float share, int channels, int plane, long long elements,
                                           Element* again) {
    wait_for_previous_launch();
    const long long whole = elements / VECTOR;  // packs; CTA 0 handles the remaining elements
    const long long first = 1LL * blockIdx.x * (THREADS * PACKS) + threadIdx.x;
    Pack<Element, VECTOR> gradients[PACKS], xs[PACKS], outputs[PACKS] = {};
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = first + i * THREADS, at = pack * VECTOR;
        gradients[i] = load_pack_if<Element, VECTOR>(pack < whole, gradient + at);
        xs[i] = load_pack_if<Element, VECTOR>(pack < whole, x + at);
        if (MASK == BY_OUTPUT) outputs[i] = load_pack_if<Element, VECTOR>(pack < whole, output + at);
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = first + i * THREADS;
        if (pack >= whole) continue;
        const Index at = static_cast<Index>(pack * VECTOR), in_plane = at / plane;
        const int c = static_cast<int>(in_plane % channels);
        const Slope slope = all.slope(c, share);
        int left = VECTOR;  // elements of the pack in this plane
        Slope next = slope;
        if (STRADDLING) {
            const int rest = plane - static_cast<int>(at - in_plane * plane);
            if (rest < VECTOR) left = rest, next = all.slope(c + 1 < channels ? c + 1 : 0, share);
        }
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const Slope& of = !STRADDLING || e < left ? slope : next;
            gradients[i].at[e] = of.of(gradients[i].at[e], xs[i].at[e], outputs[i].at[e]);
            if (RECOMPUTES) xs[i].at[e] = of.again(xs[i].at[e]);
        }
        store_pack(y + pack * VECTOR, gradients[i]);
        if (RECOMPUTES) store_pack(again + pack * VECTOR, xs[i]);
    }

    const long long last = whole * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && last < elements) {
        const Slope slope = all.slope(channel_of(static_cast<Index>(last), channels, plane), share);
        const Element own = x[last];
        y[last] = slope.of(gradient[last], own, MASK == BY_OUTPUT ? output[last] : Element());
        if (RECOMPUTES) again[last] = slope.again(own);
    }
}
