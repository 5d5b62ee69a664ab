// y[y_first + sum of i * y_stride] = x[x_first + sum of i * x_stride]                      (for each index i of each
// part)
//
// A thread moves PACKS packs, 16 bytes each if both sides are contiguous that far; all loads are in flight before the
// first store. Each part has packs as wide as its own runs, LEAST to VECTOR elements. A pack's position is computed by
// multiplications instead of divisions. Limiter: memory, and if adjacent elements of y are far apart in x, the sectors
// there.
//
// Rung: `vectorised`. Read parts.cuh (table of parts); its sizes count packs.
#include "copy/parts.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;     // vector: most elements per access
constexpr int LEAST = 1;      // least: fewest elements per access
constexpr int PACKS = 4;      // config.packs: accesses in flight per thread
constexpr int THREADS = 256;  // config.threads
#endif

template <int WIDTH>
__device__ __forceinline__ void move(const Part& part, const Element* x, Element* y) {
    if constexpr (WIDTH > LEAST) {
        if (part.vector < WIDTH) return move<WIDTH / 2>(part, x, y);
    }
    const unsigned first = (blockIdx.x - part.first_block) * (THREADS * PACKS) + threadIdx.x;
    Pack<Element, WIDTH> values[PACKS];
    long long place[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const unsigned pack = first + i * THREADS;
        if (pack >= part.count) continue;
        const Offsets offsets = offsets_of(part, pack);
        values[i] = load_pack<Element, WIDTH>(x + offsets.x);
        place[i] = offsets.y;
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
        if (first + i * THREADS < part.count) store_pack(y + place[i], values[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_vectorised(const __grid_constant__ Addresses addresses, const __grid_constant__ Parts parts) {
    wait_for_previous_launch();
    const int number = part_of_block(parts, blockIdx.x);
    move<VECTOR>(parts.at[number], addresses.x[number], addresses.y[number]);
}
