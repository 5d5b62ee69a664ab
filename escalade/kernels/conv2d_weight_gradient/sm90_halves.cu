// upper + lower = values * 2^exponent, for x (blockIdx.y 0) and the gradient (1)
//
// fp32 numbers as halves in memory (common/halves.cuh), for kernels whose products are of fp16: where a sum is over
// pixels, operands of 32 bits cannot come to wgmma as they lie. Without HAS_LOWER the upper halves alone, which have
// TF32's bits. The power of two is what common/magnitudes.cuh says: launched twice, and the second time does the work
// again if the first exponent was not good enough; it leaves the exponents behind, for sum_parts.cu to undo.
// A thread has ROUNDS packs of 8 under way. What bounds it: memory.
//
// Serves `wgmma_split` and `window_split`.
#include "common/magnitudes.cuh"

using Halved = Pack<u32, 4>;

struct Tensor {
    const float* values;
    u32 *upper, *lower;
    long long packs;  // of 8
};

__device__ __forceinline__ u32 halve(const Tensor& tensor, float scale) {
    u32 largest = 0;
    const long long stride = 1LL * gridDim.x * THREADS;
    for (long long first = 1LL * blockIdx.x * THREADS + threadIdx.x; first < tensor.packs; first += ROUNDS * stride) {
        Pack<float, 4> numbers[ROUNDS][2];
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const long long at = first + round * stride;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                numbers[round][half] = load_pack_if<float, 4>(at < tensor.packs, tensor.values + 8 * at + 4 * half);
        }
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const long long at = first + round * stride;
            Halved upper, lower;
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float* two = &numbers[round][pair / 2].at[pair % 2 * 2];
                largest = max(largest, max(magnitude_key(two[0]), magnitude_key(two[1])));
                const Halves halves = split(two[0] * scale, two[1] * scale);
                upper.at[pair] = halves.upper;
                lower.at[pair] = halves.lower;
            }
            if (at >= tensor.packs) continue;
            store_pack(tensor.upper + 4 * at, upper);
            if (HAS_LOWER) store_pack(tensor.lower + 4 * at, lower);
        }
    }
    return largest;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_weight_gradient_sm90_halves(const float* x, const float* gradient, u32* upper_x, u32* lower_x,
                                       u32* upper_gradient, u32* lower_gradient, Seen* seen, int* exponents,
                                       int attempt, long long x_packs, long long gradient_packs) {
    wait_for_previous_launch();
    const Tensor tensor = blockIdx.y == 0 ? Tensor{x, upper_x, lower_x, x_packs}
                                          : Tensor{gradient, upper_gradient, lower_gradient, gradient_packs};
    Seen& of_tensor = seen[blockIdx.y];
    __shared__ int shared_exponent;
    if (threadIdx.x < 32) {  // every warp would read the same numbers again
        const int sampled = sampled_exponent(tensor.values, 2 * tensor.packs);
        if (threadIdx.x == 0) shared_exponent = sampled;
    }
    __syncthreads();
    int exponent = shared_exponent;
    bool needed = true;
    if (attempt > 0) {
        const u32 largest_bits = of_tensor.largest_bits;
        needed = !good_exponent(exponent, largest_bits);
        if (needed) exponent = scaling_exponent(largest_bits);
        __syncthreads();
        if (threadIdx.x == 0 && take_ticket(&of_tensor.tickets, gridDim.x) == gridDim.x - 1)
            of_tensor.largest_bits = 0;
        if (blockIdx.x == 0 && threadIdx.x == 0) exponents[blockIdx.y] = exponent;
    }
    if (!needed) return;
    const u32 largest = warp_max(halve(tensor, power_of_two(exponent)));
    if (attempt == 0 && threadIdx.x % 32 == 0) atomicMax(&of_tensor.largest_bits, magnitude_bits(largest));
}
