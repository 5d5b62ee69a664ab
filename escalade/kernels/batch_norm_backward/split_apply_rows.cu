// y[row][c] = weight[c] * rstd[c] * (g - mean of g - (x - mean[c]) * rstd[c] * mean of g * (x - mean[c]) * rstd[c])
// (NHWC)
//
// g is the gradient before the ReLU, if any. Last of three launches. A thread keeps VECTOR channels with their values
// in registers and walks the rows in steps of the whole grid, PACKS steps in flight. Rows go from the last to the
// first: the first launch has just read the last ones, so they may still be in L2. Limiter: memory. A thread reads
// everything before it writes, so y may be the gradient or x.
//
// Rung          switches
//   split       VECTOR 1, PACKS 1
//   vectorised  VECTOR up to 16 bytes, several PACKS
// Read batch_norm_backward.cuh.
#include "batch_norm_backward/batch_norm_backward.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
constexpr int VECTOR = 4;     // vector: channels per access
constexpr int PACKS = 4;      // config.packs: accesses in flight per thread
constexpr int THREADS = 256;  // config.threads
constexpr int RESIDENT = 2;   // config.resident: CTAs per SM
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    batch_norm_backward_split_apply_rows(const Element* gradient, const Element* x, const Element* output, Channels all,
                                         Element* y, float share, int channels, int width, long long rows,
                                         Element* again) {
    wait_for_previous_launch();
    const int height = THREADS / width;
    const int row_in_block = threadIdx.x / width;
    const int channel = (blockIdx.y * width + threadIdx.x - row_in_block * width) * VECTOR;
    if (row_in_block >= height || channel >= channels) return;

    const long long step = 1LL * gridDim.x * height;
    Pack<Element, VECTOR> gradients[PACKS], xs[PACKS], outputs[PACKS];
    const auto load = [&](long long row) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const bool inside = row - i * step >= 0;
            const long long at = (row - i * step) * channels + channel;
            gradients[i] = load_pack_if<Element, VECTOR>(inside, gradient + at);
            xs[i] = load_pack_if<Element, VECTOR>(inside, x + at);
            outputs[i] = load_pack_if<Element, VECTOR>(MASK == BY_OUTPUT && inside, output + at);
        }
    };
    long long row = rows - 1 - (1LL * blockIdx.x * height + row_in_block);
    load(row);  // before anything waits for the channels' values

    Slope slopes[VECTOR];
    {
        float means[VECTOR], rstds[VECTOR], weights[VECTOR], biases[VECTOR] = {}, products[VECTOR], sums[VECTOR];
        load_channels(all.mean + channel, means);
        load_channels(all.rstd + channel, rstds);
        load_channels(all.weight + channel, weights);
        if (NEEDS_BIAS) load_channels(all.bias + channel, biases);
        load_channels(all.weight_gradient + channel, products);
        load_channels(all.bias_gradient + channel, sums);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            slopes[e] = Slope(means[e], rstds[e], weights[e], biases[e], products[e], sums[e], share);
    }
    while (row >= 0) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (row - i * step < 0) break;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                gradients[i].at[e] = slopes[e].of(gradients[i].at[e], xs[i].at[e], outputs[i].at[e]);
            store_pack(y + (row - i * step) * channels + channel, gradients[i]);
            if (RECOMPUTES) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) xs[i].at[e] = slopes[e].again(xs[i].at[e]);
                store_pack(again + (row - i * step) * channels + channel, xs[i]);
            }
        }
        row -= PACKS * step;
        load(row);
    }
}
