// y[n][c][p] = weight[c] * rstd[c] * (g - mean of g - (x - mean[c]) * rstd[c] * mean of g * (x - mean[c]) * rstd[c])
//
// In NCHW; g is the gradient in front of the ReLU, if there is one. The last of three launches. VECTOR elements an access
// over the whole array, and PACKS of them under way in a thread. A pack lies in one plane, or, where STRADDLING, runs
// over into the next one, which is the next channel's: a plane has at least VECTOR elements. A warp mostly stands in one
// plane, so that the numbers of its channel are one cached load for all lanes. What bounds it: memory. A thread has read
// all that it writes, so y may be the gradient or x.
//
// Serves `split` and `vectorised`. batch_norm_backward.cuh has what becomes of an element.
//
// | rung | VECTOR | PACKS |
// | --- | --- | --- |
// | `split` | 1 | 1 |
// | `vectorised` | 16 bytes | several |
#include "batch_norm_backward/batch_norm_backward.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_backward_split_apply_planes(const Element* gradient, const Element* x, const Element* output,
                                           Channels all, Element* y, float share, int channels, int plane, long long elements) {
    wait_for_previous_launch();
    const long long whole = elements / VECTOR;  // packs; the few elements behind them are the first block's
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
        int left = VECTOR;  // elements of the pack that are still of this plane
        Slope next = slope;
        if (STRADDLING) {
            const int rest = plane - static_cast<int>(at - in_plane * plane);
            if (rest < VECTOR) left = rest, next = all.slope(c + 1 < channels ? c + 1 : 0, share);
        }
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const Slope& of = !STRADDLING || e < left ? slope : next;
            gradients[i].at[e] = of.of(gradients[i].at[e], xs[i].at[e], outputs[i].at[e]);
        }
        store_pack(y + pack * VECTOR, gradients[i]);
    }

    const long long last = whole * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && last < elements)
        y[last] = all.slope(channel_of(static_cast<Index>(last), channels, plane), share)
                      .of(gradient[last], x[last], MASK == BY_OUTPUT ? output[last] : Element());
}
