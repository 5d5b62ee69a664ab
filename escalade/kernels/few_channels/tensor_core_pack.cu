// packed[unit][load][lane] = the weights in mma fragment order, four registers at a time
//
// SPLIT: the weights of a filter are multiplied by the power of two (stored in `exponents`) that brings their max
// magnitude into [2^14, 2^15), and split into an upper and a lower half; a filter with a non-finite weight is marked.
// Limiter: one launch, once per network.
//
// Rungs                    switches
//   images_a_tile, pooled  none
//   split_halves           SPLIT
// tensor_core.cuh defines the order of the elements.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;   // problem.storage
using Operand = __half;  // columns.operand
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "common/pairs.cuh"
#include "common/halves.cuh"
#include "few_channels/tensor_core.cuh"

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;

__device__ __forceinline__ int exponent_of(const Element* __restrict__ weight, int filter) {
    u32 largest = 0;
    for (int i = 0; i < CHANNELS * TAPS; ++i)
        largest = max(largest, __float_as_uint(to_float(weight[filter * CHANNELS * TAPS + i])) & 0x7FFFFFFF);
    return largest < INFINITY_BITS ? scaling_exponent(largest) : NOT_FINITE;
}

// Element k of a fragment's column; zero where the filter has none.
__device__ __forceinline__ float weight_at(const Element* __restrict__ weight, int fragment, int k, int offset,
                                           int filter) {
    const int r = SINGLE ? fragment % ROW_PAIR_STEPS * 2 + k / 8 - fragment / ROW_PAIR_STEPS : fragment / ROW_STEPS;
    const int s = (SINGLE ? k % 8 : fragment % ROW_STEPS * 4 + k / 4) - offset;
    const int c = SINGLE ? 0 : k % 4;
    if (filter >= FILTERS || r < 0 || r >= FILTER_HEIGHT || s < 0 || s >= FILTER_WIDTH || c >= CHANNELS) return 0.f;
    return to_float(weight[(filter * CHANNELS + c) * TAPS + r * FILTER_WIDTH + s]);
}

extern "C" __global__ void few_channels_tensor_core_pack(const Element* __restrict__ weight, u32* __restrict__ packed,
                                             int* __restrict__ exponents) {
    wait_for_previous_launch();
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (SPLIT && at < FILTERS) exponents[at] = exponent_of(weight, at);
    if (at >= UNITS * PACKED * 128) return;
    const int lane = at / 4 % 32, number = at / 128 % PACKED * 4 + at % 4, unit = at / 128 / PACKED;
    const int fragment = number / (2 * TILES_N) % FRAGMENTS, set = number / (2 * TILES_N) / FRAGMENTS;
    const int block = number / 2 % TILES_N;
    const int column = lane / 4, member = column / 2, second = column % 2;
    const int offset = PAIRED ? second : lane_offset(unit, member);
    const int filter = first_filter(unit, member) + (PAIRED ? block : 2 * block + second);
    const int k = number % 2 * 8 + lane % 4 * 2;
    float low = 0.f, high = 0.f;
    if (set < SETS) {
        low = weight_at(weight, fragment, k, offset, filter);
        high = weight_at(weight, fragment, k + 1, offset, filter);
    }
    if constexpr (SPLIT) {
        const int exponent = filter < FILTERS ? exponent_of(weight, filter) : 0;
        const float scale = power_of_two(exponent == NOT_FINITE ? 0 : exponent);
        const Halves halves = split(low * scale, high * scale);
        packed[at] = set == 0 ? halves.upper : halves.lower;
    } else {
        packed[at] = pack_pair<Operand>(low, high);
    }
}
