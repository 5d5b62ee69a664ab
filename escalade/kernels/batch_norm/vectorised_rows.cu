// y[row][c] = relu((x[row][c] - mean[c]) * weight[c] / sqrt(variance[c] + epsilon) + bias[c] + residual[row][c])
// (NHWC)
//
// A row is a pixel's channels; rows may be pitched. A thread keeps VECTOR channels, up to 16 bytes, with their values
// in registers, and walks down the rows, PACKS in flight. A CTA is `width` packs wide; its remaining threads take
// further rows. BACKWARDS: the last rows come first, because they are in L2 if the previous launch has just read them.
// Limiter: memory. A thread reads everything before it writes, so y may be x or the residual.
//
// Rung: `vectorised`, also of `batch_norm_training`. Read batch_norm.cuh.
#include "batch_norm/batch_norm.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype
constexpr int VECTOR = 4;          // vector: channels per access
constexpr int PACKS = 4;           // config.packs: accesses in flight per thread
constexpr int THREADS = 256;       // config.threads
constexpr bool PITCHED = false;    // pitched
constexpr bool BACKWARDS = false;  // config.backwards: last rows first, which a previous launch left in L2
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_vectorised_rows(const Element* x, const float* __restrict__ weight, const float* __restrict__ bias,
                               const float* __restrict__ mean, const float* __restrict__ variance,
                               const Element* residual, Element* y, float epsilon, int channels, int width,
                               long long rows, int turns, int x_pitch, int residual_pitch, int y_pitch) {
    wait_for_previous_launch();
    const int height = THREADS / width;
    const int row_in_block = threadIdx.x / width;
    const int channel = (blockIdx.y * width + threadIdx.x - row_in_block * width) * VECTOR;
    if (row_in_block >= height || channel >= channels) return;

    const int block = BACKWARDS ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    long long row = 1LL * block * turns * PACKS * height + row_in_block;
    if (!PITCHED) x_pitch = residual_pitch = y_pitch = channels;
    Pack<Element, VECTOR> values[PACKS], others[PACKS];
    const auto load = [&](bool wanted) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const long long at = row + i * height;
            if (!wanted || at >= rows) continue;
            values[i] = load_pack<Element, VECTOR>(x + at * x_pitch + channel);
            others[i] = load_pack_if<Element, VECTOR>(HAS_RESIDUAL, residual + at * residual_pitch + channel);
        }
    };
    load(true);  // before anything waits for the channels' values

    float means[VECTOR], biases[VECTOR], variances[VECTOR], scales[VECTOR];
    load_channels(mean + channel, means);
    load_channels(bias + channel, biases);
    load_channels(variance + channel, variances);
    load_channels(weight + channel, scales);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) scales[e] *= rsqrtf(variances[e] + epsilon);
    for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (row + i * height >= rows) continue;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                values[i].at[e] = normalized(values[i].at[e], means[e], scales[e], biases[e], others[i].at[e]);
            store_pack(y + (row + i * height) * y_pitch + channel, values[i]);
        }
        row += PACKS * height;
        load(turn + 1 < turns);
    }
}
