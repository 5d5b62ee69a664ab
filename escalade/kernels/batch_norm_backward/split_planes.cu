// partial[0][split][c], partial[1][split][c] = sums of g and of g * (x - mean[c]) over a share of channel c
// (NCHW)
//
// g is the gradient before the ReLU, if any; with HAS_RESIDUAL it is also a result, the residual's gradient. Several
// CTAs per channel, enough to fill every SM, loop over its packs of VECTOR elements image by image, PACKS in flight per
// thread. Lanes reduce by shuffles, warps in smem, CTAs in a second launch, each in a fixed order: no atomics, so every
// run gives the same bits. Limiter: memory, each element is read once.
//
// Rung          switches
//   split       VECTOR 1, PACKS 1
//   vectorised  VECTOR up to 16 bytes, several PACKS
// Read batch_norm_backward.cuh.
#include "batch_norm_backward/batch_norm_backward.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr int VECTOR = 4;             // vector: elements per access
constexpr int PACKS = 4;              // config.packs: accesses in flight per thread
constexpr int THREADS = 256;          // config.threads
constexpr int RESIDENT = 2;           // config.resident: CTAs per SM
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    batch_norm_backward_split_planes(const Element* gradient, const Element* x, const Element* output,
                                     const float* __restrict__ weight, const float* __restrict__ bias,
                                     const float* __restrict__ mean, const float* __restrict__ rstd,
                                     Element* residual_gradient, float* partial, int channels, int plane, int splits,
                                     long long packs) {
    constexpr int WARPS = THREADS / 32;
    __shared__ float of_warps[2][WARPS];
    wait_for_previous_launch();
    const int c = blockIdx.x / splits, split = blockIdx.x - c * splits;
    const Index plane_packs = plane / VECTOR, step = static_cast<Index>(splits) * THREADS;
    const float middle = mean[c], scale = MASK == BY_X ? weight[c] * rstd[c] : 0.f, shift = MASK == BY_X ? bias[c] : 0.f;

    float sum = 0.f, products = 0.f;
    for (Index first = static_cast<Index>(split) * THREADS + threadIdx.x; first < packs; first += PACKS * step) {
        Pack<Element, VECTOR> gradients[PACKS], xs[PACKS], outputs[PACKS] = {};
        long long places[PACKS];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const Index pack = first + i * step, image = pack / plane_packs;
            const bool inside = pack < packs;
            places[i] = (1LL * image * channels + c) * plane + static_cast<int>(pack - image * plane_packs) * VECTOR;
            gradients[i] = load_pack_if<Element, VECTOR>(inside, gradient + places[i]);
            xs[i] = load_pack_if<Element, VECTOR>(inside, x + places[i]);
            if (MASK == BY_OUTPUT) outputs[i] = load_pack_if<Element, VECTOR>(inside, output + places[i]);
        }
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float distance = to_float(xs[i].at[e]) - middle;
                const float before = before_function(to_float(gradients[i].at[e]), distance, scale, shift,
                                                     outputs[i].at[e]);  // 0 past the last pack
                if (HAS_RESIDUAL) gradients[i].at[e] = from_float<Element>(before);
                sum += before;
                products += before * distance;
            }
            if (HAS_RESIDUAL && first + i * step < packs) store_pack(residual_gradient + places[i], gradients[i]);
        }
    }

    sum = warp_sum(sum), products = warp_sum(products);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) of_warps[0][warp] = sum, of_warps[1][warp] = products;
    __syncthreads();
    if (warp > 1) return;
    const float total = warp_sum(lane < WARPS ? of_warps[warp][lane] : 0.f);
    if (lane == 0) partial[(1LL * warp * splits + split) * channels + c] = total;
}
