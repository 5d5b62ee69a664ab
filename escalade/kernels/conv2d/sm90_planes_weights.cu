// packed[tile][chunk][row group][column s][part][row r of the group][c / 4][k][c % 4] = weight[k][c][r][s],
// for WGMMA_N filters k of a tile, K_STEP channels of a chunk, PART_STEPS * 8 channels c of a part, COLUMN_TAPS rows of a
// group
//
// The smem layout of wgmma operands without swizzle: 16 bytes of channels, 8 filters apart by 16 bytes each. Filters and
// channels that do not exist are zero. Weights are raised by FACTOR, the mean loss of x to truncation, and rounded to
// TF32. One thread per element. Limiter: memory, once per network.
//
// TRANSPOSED: `weight` is that of the convolution [c][plane][row][column], of which this is the gradient. Filter k is
// phase (a, b) of a plane (conv2d/planes_phases.cuh), and tap (i, j) its tap (a + PHASES_H * (rows - 1 - i), b + PHASES_W * (columns - 1 - j)), if
// it has that one.
//
// Rung: `planes` of conv2d and of conv2d_input_gradient.
#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int WGMMA_N = 128;    // config.width
constexpr int K_STEP = 32;      // tiling.k_step
constexpr int COLUMN_TAPS = 3;  // tiling.column_taps
constexpr int PART_STEPS = 1;   // tiling.part_steps
constexpr float FACTOR = 1.0f;  // factor
constexpr bool TRANSPOSED = false;  // transposed
constexpr int PHASES_H = 1;         // phases[0]
constexpr int PHASES_W = 1;         // phases[1]
#endif

#include "conv2d/planes_phases.cuh"

struct Filters {
    int filters, channels, rows, columns;  // of the packed weights: all phases' filters
    int height, width;                     // of the filters of the weights; the same unless TRANSPOSED
};

__device__ __forceinline__ float weight_at(const float* weight, const Filters& size, int filter, int channel, int i, int j) {
    const Phase phase = phase_of(filter);
    const int planes = size.filters / (PHASES_H * PHASES_W);
    if (phase.plane >= planes || channel >= size.channels) return 0.f;
    if (!TRANSPOSED)
        return weight[((1LL * filter * size.channels + channel) * size.rows + i) * size.columns + j];
    const int r = phase.row + PHASES_H * (size.rows - 1 - i), s = phase.column + PHASES_W * (size.columns - 1 - j);
    if (r >= size.height || s >= size.width) return 0.f;
    return weight[((1LL * channel * planes + phase.plane) * size.height + r) * size.width + s];
}

extern "C" __global__ void conv2d_sm90_planes_weights(const float* __restrict__ weight, float* __restrict__ packed,
                                                      long long elements, Filters size) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    constexpr int CHANNELS = PART_STEPS * 8, STAGE = COLUMN_TAPS * CHANNELS * WGMMA_N, PARTS = K_STEP / CHANNELS;
    const int chunks = (size.channels + K_STEP - 1) / K_STEP, within = at % STAGE;
    long long stage = at / STAGE;
    const auto next_index = [&](int count) {
        const int index = static_cast<int>(stage % count);
        stage /= count;
        return index;
    };
    const int part = next_index(PARTS), j = next_index(size.columns), group = next_index(size.rows / COLUMN_TAPS);
    const int chunk = next_index(chunks), filter = static_cast<int>(stage) * WGMMA_N + within / 4 % WGMMA_N;
    const int i = group * COLUMN_TAPS + within / (CHANNELS * WGMMA_N);
    const int channel = chunk * K_STEP + part * CHANNELS + within / 4 / WGMMA_N % (CHANNELS / 4) * 4 + within % 4;
    packed[at] = __uint_as_float(to_tf32(weight_at(weight, size, filter, channel, i, j) * FACTOR));
}
