// partial[0][block][c], partial[1][block][c] = sums of g and of g * (x - mean[c]) over a CTA's rows
// (NHWC)
//
// g is the gradient before the ReLU, if any; with HAS_RESIDUAL it is also a result, the residual's gradient. A row is a
// pixel's channels. A thread keeps VECTOR channels and walks down the rows in steps of the whole grid, PACKS steps in
// flight; a CTA is `width` packs wide, and its threads with the same channels reduce in smem. A second launch reduces
// the CTAs' sums in a fixed order: no atomics, so every run gives the same bits. Limiter: memory, each element is read
// once.
//
// Rung          switches
//   split       VECTOR 1, PACKS 1
//   vectorised  VECTOR up to 16 bytes, several PACKS
// Read batch_norm_backward.cuh.
#include "batch_norm_backward/batch_norm_backward.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr int VECTOR = 4;             // vector: channels per access
constexpr int PACKS = 4;              // config.packs: accesses in flight per thread
constexpr int THREADS = 256;          // config.threads
constexpr int RESIDENT = 2;           // config.resident: CTAs per SM
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    batch_norm_backward_split_rows(const Element* gradient, const Element* x, const Element* output,
                                   const float* __restrict__ weight, const float* __restrict__ bias,
                                   const float* __restrict__ mean, const float* __restrict__ rstd,
                                   Element* residual_gradient, float* partial, int channels, int width,
                                   long long rows) {
    __shared__ float parts[2][VECTOR][THREADS];
    wait_for_previous_launch();
    const int height = THREADS / width;
    const int row_in_block = threadIdx.x / width;
    const int channel = (blockIdx.y * width + threadIdx.x - row_in_block * width) * VECTOR;

    float sums[VECTOR] = {}, products[VECTOR] = {};
    if (row_in_block < height && channel < channels) {
        float means[VECTOR], scales[VECTOR] = {}, biases[VECTOR] = {};
        load_channels(mean + channel, means);
        if (MASK == BY_X) {
            float deviations[VECTOR];
            load_channels(rstd + channel, deviations);
            load_channels(weight + channel, scales);
            load_channels(bias + channel, biases);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) scales[e] *= deviations[e];
        }
        const long long step = 1LL * gridDim.x * height;
        for (long long row = 1LL * blockIdx.x * height + row_in_block; row < rows; row += PACKS * step) {
            Pack<Element, VECTOR> gradients[PACKS], xs[PACKS], outputs[PACKS] = {};
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const bool inside = row + i * step < rows;
                const long long at = (row + i * step) * channels + channel;
                gradients[i] = load_pack_if<Element, VECTOR>(inside, gradient + at);
                xs[i] = load_pack_if<Element, VECTOR>(inside, x + at);
                if (MASK == BY_OUTPUT) outputs[i] = load_pack_if<Element, VECTOR>(inside, output + at);
            }
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    const float distance = to_float(xs[i].at[e]) - means[e];
                    const float before = before_function(to_float(gradients[i].at[e]), distance, scales[e], biases[e],
                                                         outputs[i].at[e]);  // 0 past the last row
                    if (HAS_RESIDUAL) gradients[i].at[e] = from_float<Element>(before);
                    sums[e] += before;
                    products[e] += before * distance;
                }
                if (HAS_RESIDUAL && row + i * step < rows)
                    store_pack(residual_gradient + (row + i * step) * channels + channel, gradients[i]);
            }
        }
    }

#pragma unroll
    for (int e = 0; e < VECTOR; ++e) parts[0][e][threadIdx.x] = sums[e], parts[1][e][threadIdx.x] = products[e];
    __syncthreads();
    for (int at = threadIdx.x; at < 2 * VECTOR * width; at += THREADS) {
        const int in_pack = at % VECTOR, pack = at / VECTOR % width, which = at / (VECTOR * width);
        const int c = (blockIdx.y * width + pack) * VECTOR + in_pack;
        if (c >= channels) continue;
        float total = 0.f;
        for (int row = 0; row < height; ++row) total += parts[which][in_pack][row * width + pack];
        partial[(1LL * which * gridDim.x + blockIdx.x) * channels + c] = total;
    }
}
