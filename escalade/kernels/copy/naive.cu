// y[y_first + sum of i * y_stride] = x[x_first + sum of i * x_stride]                      (for each index i of each
// part)
//
// The foot of the ladder: one thread per element, in y's order, its position by division. Limiter: the divisions, few
// bytes in flight, and sectors of x of which one element is read.
//
// Rung: `naive`. Read parts.cuh (table of parts).
#include "copy/parts.cuh"

extern "C" __global__ void copy_naive(const __grid_constant__ Addresses addresses, const __grid_constant__ Parts parts) {
    wait_for_previous_launch();
    const int number = part_of_block(parts, blockIdx.x);
    const Part& part = parts.at[number];
    long long rest = 1LL * (blockIdx.x - part.first_block) * blockDim.x + threadIdx.x;
    long long x = 0, y = 0;
#pragma unroll
    for (int d = RANK - 1; d >= 0; --d) {
        const long long index = rest % part.size[d];
        x += index * part.x_stride[d];
        y += index * part.y_stride[d];
        rest /= part.size[d];
    }
    if (rest == 0) addresses.y[number][y] = addresses.x[number][x];
}
