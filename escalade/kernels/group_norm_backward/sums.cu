// partial[..] = sums of g and of g * (x - mean) * rstd over a share of the pixels of a channel of an image
//
// First of three launches. In NHWC a thread keeps VECTOR channels and walks down its CTA's pixels, PACKS in flight; a
// CTA is `width` packs of channels wide, which divide a pixel's. In NCHW a CTA has a share of a plane. The CTA's
// threads of the same channel reduce in smem, in a fixed order. Limiter: memory, each element is read once.
//
// Rung        switches
//   naive     VECTOR 1, PACKS 1
//   split     VECTOR up to 16 bytes, several PACKS
// Read group_norm_backward.cuh.
#include "common/block.cuh"
#include "group_norm_backward/group_norm_backward.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;  // vector: elements per access
constexpr int PACKS = 2;   // config.packs: accesses in flight per thread and tensor
#endif

constexpr int SUMS = NHWC ? VECTOR : 1;  // channels per thread

// `rows` are pixels in NHWC, and packs of a plane in NCHW, of which each CTA has up to `share`.
extern "C" __global__ void __launch_bounds__(THREADS)
    group_norm_backward_sums(const Gradient* gradient, const Element* x, const float* weight, const float* bias,
                             const float* mean, const float* rstd, float2* partial, int width, int rows, int splits,
                             int share) {
    wait_for_previous_launch();
    const int outer = blockIdx.x / splits, split = blockIdx.x - outer * splits;  // an image, or a plane
    const int height = THREADS / width, row_in_block = threadIdx.x / width;
    const int inner = (blockIdx.y * width + threadIdx.x - row_in_block * width) * VECTOR;
    constexpr int ROW = NHWC ? IMAGE_CHANNELS : VECTOR;
    const int image = NHWC ? outer : outer / IMAGE_CHANNELS, channel = NHWC ? inner : outer - image * IMAGE_CHANNELS;

    float sums[SUMS] = {}, products[SUMS] = {}, means[SUMS] = {}, deviations[SUMS] = {}, scales[SUMS] = {},
          biases[SUMS] = {};
    if (row_in_block < height) {
#pragma unroll
        for (int e = 0; e < SUMS; ++e) {
            const long long group = 1LL * image * IMAGE_GROUPS + (channel + e) / GROUP_CHANNELS;
            means[e] = mean[group], deviations[e] = rstd[group];
            if (HAS_FUNCTION) scales[e] = deviations[e] * weight_of(weight, channel + e);
            biases[e] = bias_of(bias, channel + e);
        }
        const int end = min(rows, (split + 1) * share);
        const long long first = 1LL * outer * rows * ROW + inner;
        for (int row = split * share + row_in_block; row < end; row += PACKS * height) {
            Pack<Gradient, VECTOR> gradients[PACKS];
            Pack<Element, VECTOR> xs[PACKS];
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const bool inside = row + i * height < end;
                const long long at = first + 1LL * (row + i * height) * ROW;
                gradients[i] = load_pack_if<Gradient, VECTOR>(inside, gradient + at);
                xs[i] = load_pack_if<Element, VECTOR>(inside, x + at);
            }
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                if (HAS_FUNCTION && row + i * height >= end) continue;  // a function of zeros may be anything
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    const int c = NHWC ? e : 0;
                    const float distance = to_float(xs[i].at[e]) - means[c];
                    const float before =
                        before_function(to_float(gradients[i].at[e]), distance, scales[c], biases[c]);
                    sums[c] += before;
                    products[c] += before * distance;
                }
            }
        }
    }
    float2* const to = partial + 1LL * blockIdx.x * (NHWC ? IMAGE_CHANNELS : 1);
    if constexpr (NHWC) {
        __shared__ float2 parts[SUMS][THREADS];
#pragma unroll
        for (int e = 0; e < SUMS; ++e) parts[e][threadIdx.x] = make_float2(sums[e], products[e] * deviations[e]);
        __syncthreads();
        for (int at = threadIdx.x; at < VECTOR * width; at += THREADS) {
            const int pack = at / VECTOR, c = blockIdx.y * width * VECTOR + at;
            float2 total = make_float2(0.f, 0.f);
            for (int row = 0; row < height; ++row) {
                const float2 part = parts[at % VECTOR][row * width + pack];
                total.x += part.x, total.y += part.y;
            }
            to[c] = total;
        }
    } else {
        const float sum = block_sum<THREADS>(sums[0]), product = block_sum<THREADS>(products[0] * deviations[0]);
        if (threadIdx.x == 0) *to = make_float2(sum, product);
    }
}
