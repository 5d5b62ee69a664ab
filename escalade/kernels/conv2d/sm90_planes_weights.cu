// packed[tile][chunk][tap][c / 4][k][c % 4] = weight[k][c][tap], for WGMMA_N filters k and K_STEP channels c at a time
//
// The smem layout of wgmma operands without swizzle: 16 bytes of channels, 8 filters apart by 16 bytes each. Filters and
// channels that do not exist are zero. Weights are raised by FACTOR, the mean loss of x to truncation, and rounded to
// TF32. One thread per element. Limiter: memory, once per network.
//
// Rung: `planes`.
#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int WGMMA_N = 128;    // config.width
constexpr int K_STEP = 32;      // tiling.k_step
constexpr float FACTOR = 1.0f;  // factor
#endif

extern "C" __global__ void conv2d_sm90_planes_weights(const float* __restrict__ weight, float* __restrict__ packed,
                                                      long long elements, int filters, int channels, int taps) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    const int chunks = (channels + K_STEP - 1) / K_STEP;
    const int within = at % (WGMMA_N * K_STEP);
    const long long block = at / (WGMMA_N * K_STEP);
    const int tap = block % taps, chunk = block / taps % chunks;
    const int filter = static_cast<int>(block / taps / chunks) * WGMMA_N + within / 4 % WGMMA_N;
    const int channel = chunk * K_STEP + within / 4 / WGMMA_N * 4 + within % 4;
    const bool exists = filter < filters && channel < channels;
    const float value = exists ? weight[(1LL * filter * channels + channel) * taps + tap] : 0.f;
    packed[at] = __uint_as_float(to_tf32(value * FACTOR));
}
