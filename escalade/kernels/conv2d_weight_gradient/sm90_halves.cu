// upper + lower = values * 2^exponents[channel], for x (blockIdx.y 0) and the gradient (1)
//
// Splits fp32 into halves in memory (common/halves.cuh) for fp16 MMAs: wgmma takes MN-major operands, which a sum over
// pixels needs, only in 16 bits. Without HAS_LOWER, the upper halves alone, which have TF32's bits. Every channel has
// its own power of two, so none loses bits because another is larger: each sum involves one channel of x and one of the
// gradient, and sum_parts.cu undoes both. Exponents are estimated as in common/magnitudes.cuh, from sample rows common
// to all CTAs. Launched twice: the second launch redoes channels whose first exponent was not good enough.
// A thread has 8 channels, with ROUNDS rows in flight. Limiter: memory.
//
// Rungs: `wgmma_split`, `window_split`.
#include "common/magnitudes.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int THREADS = 256;      // threads
constexpr int BLOCKS_PER_SM = 3;  // blocks_per_sm
constexpr int ROUNDS = 4;         // rounds
constexpr bool HAS_LOWER = true;  // lower
#endif

using Halved = Pack<u32, 4>;

constexpr int WIDTH = 8;          // channels per thread
constexpr int SAMPLED_ROWS = 16;  // at least

struct Tensor {
    const float* values;
    u32 *upper, *lower;
    u32* largest;    // bits of each channel's max magnitude: zero before the first attempt and after the second
    u32* tickets;    // per blockIdx.z
    int* exponents;  // per channel
    int* first;      // those of the first attempt
    long long rows;
    int groups;  // of WIDTH channels, per row
};

struct Column {  // a thread's part of a tensor
    int group;   // of its WIDTH channels
    int lane, lanes;

    __device__ __forceinline__ explicit Column(int groups) {
        const int before = blockIdx.z * THREADS, width = max(min(groups - before, THREADS), 1);
        group = before + threadIdx.x % width;
        lane = threadIdx.x / width;
        lanes = THREADS / width;  // rows that a CTA has at once; excess threads have none
        if (lane >= lanes || before >= groups) lane = -1;
    }
};

__device__ __forceinline__ void load_row(Pack<float, 4> (&two)[2], const Tensor& tensor, const Column& column,
                                         long long row) {
    const float* from = tensor.values + (row * tensor.groups + column.group) * WIDTH;
#pragma unroll
    for (int half = 0; half < 2; ++half) two[half] = load_pack_if<float, 4>(row < tensor.rows, from + 4 * half);
}

__device__ __forceinline__ void note_largest(u32 (&largest)[WIDTH], const Pack<float, 4> (&two)[2]) {
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) largest[e] = max(largest[e], magnitude_key(two[e / 4].at[e % 4]));
}

// Max of the keys over a CTA's threads with the same channels.
__device__ __forceinline__ void reduce_largest(u32 (&largest)[WIDTH], const Column& column, u32 (&keys)[THREADS][WIDTH]) {
    const int at = column.group - blockIdx.z * THREADS;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) keys[threadIdx.x][e] = 0;
    __syncthreads();
#pragma unroll
    for (int e = 0; column.lane >= 0 && e < WIDTH; ++e) atomicMax(&keys[at][e], largest[e]);
    __syncthreads();
#pragma unroll
    for (int e = 0; column.lane >= 0 && e < WIDTH; ++e) largest[e] = keys[at][e];
}

// From rows an odd number apart. A channel whose sample is all zero uses the max of the others.
__device__ __forceinline__ void sample(int (&exponents)[WIDTH], const Tensor& tensor, const Column& column,
                                       u32 (&keys)[THREADS][WIDTH], u32& of_all) {
    const int samples = (SAMPLED_ROWS + column.lanes - 1) / column.lanes, rows = samples * column.lanes;
    const long long step = tensor.rows >= rows ? (tensor.rows / rows - 1) | 1 : 1;
    u32 largest[WIDTH] = {};
    if (threadIdx.x == 0) of_all = 0;
#pragma unroll 4
    for (int i = 0; i < samples && column.lane >= 0; ++i) {
        Pack<float, 4> two[2];
        load_row(two, tensor, column, (i * column.lanes + column.lane) * step);
        note_largest(largest, two);
    }
    reduce_largest(largest, column, keys);
    u32 mine = 0;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) mine = max(mine, largest[e]);
    mine = warp_max(mine);
    if (threadIdx.x % 32 == 0) atomicMax(&of_all, mine);
    __syncthreads();
    const u32 all_bits = magnitude_bits(of_all);
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
        const u32 bits = magnitude_bits(largest[e]);
        exponents[e] = all_bits == 0 ? FIRST_EXPONENT : scaling_exponent(bits == 0 ? all_bits : bits) - MARGIN;
    }
}

__device__ __forceinline__ void halve(u32 (&largest)[WIDTH], const Tensor& tensor, const Column& column,
                                      const int (&exponents)[WIDTH]) {
    float scales[WIDTH];
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) scales[e] = power_of_two(exponents[e]);
    const long long stride = 1LL * gridDim.x * column.lanes;
    for (long long first = 1LL * blockIdx.x * column.lanes + column.lane; first < tensor.rows; first += ROUNDS * stride) {
        Pack<float, 4> numbers[ROUNDS][2];
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) load_row(numbers[round], tensor, column, first + round * stride);
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const long long row = first + round * stride;
            note_largest(largest, numbers[round]);
            Halved upper, lower;
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float* two = &numbers[round][pair / 2].at[pair % 2 * 2];
                const Halves halves = split(two[0] * scales[2 * pair], two[1] * scales[2 * pair + 1]);
                upper.at[pair] = halves.upper;
                lower.at[pair] = halves.lower;
            }
            if (row >= tensor.rows) continue;
            const long long at = 4 * (row * tensor.groups + column.group);
            store_pack(tensor.upper + at, upper);
            if (HAS_LOWER) store_pack(tensor.lower + at, lower);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_weight_gradient_sm90_halves(const float* x, const float* gradient, u32* upper_x, u32* lower_x,
                                       u32* upper_gradient, u32* lower_gradient, u32* seen, int* exponents, int attempt,
                                       long long x_rows, long long gradient_rows, int channels, int filters) {
    __shared__ u32 keys[THREADS][WIDTH];
    __shared__ u32 shared_number;
    wait_for_previous_launch();
    const int both = channels + filters;
    u32* const tickets = seen + both + blockIdx.y * gridDim.z + blockIdx.z;
    const Tensor tensor =
        blockIdx.y == 0 ? Tensor{x, upper_x, lower_x, seen, tickets, exponents, exponents + both, x_rows, channels / WIDTH}
                        : Tensor{gradient, upper_gradient, lower_gradient, seen + channels, tickets, exponents + channels,
                                 exponents + both + channels, gradient_rows, filters / WIDTH};
    const Column column(tensor.groups);
    const int first_channel = column.group * WIDTH;
    const bool writes_exponents = blockIdx.x == 0 && column.lane == 0;  // stores the exponents of its channels
    int exponent[WIDTH] = {};
    u32 largest[WIDTH] = {};
    if (attempt == 0) {
        sample(exponent, tensor, column, keys, shared_number);
        if (writes_exponents)
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) tensor.first[first_channel + e] = exponent[e];
        if (column.lane >= 0) halve(largest, tensor, column, exponent);
        reduce_largest(largest, column, keys);
        if (column.lane == 0)
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) atomicMax(&tensor.largest[first_channel + e], magnitude_bits(largest[e]));
        return;
    }
    bool needed = false;
    if (column.lane >= 0) {
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            const u32 largest_bits = tensor.largest[first_channel + e];
            exponent[e] = tensor.first[first_channel + e];
            if (!good_exponent(exponent[e], largest_bits)) {
                needed = true;
                exponent[e] = scaling_exponent(largest_bits);
            }
            if (writes_exponents) tensor.exponents[first_channel + e] = exponent[e];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) shared_number = take_ticket(tensor.tickets, gridDim.x);
    __syncthreads();
    if (shared_number == gridDim.x - 1 && column.lane == 0)
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) tensor.largest[first_channel + e] = 0;
    if (needed) halve(largest, tensor, column, exponent);
}
