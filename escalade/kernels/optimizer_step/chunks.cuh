// How the tensors of a model are cut into chunks, a block each, and what blocks leave each other.
//
// Addresses and sizes are parameters of the launch: a table that is in constant memory before the first block is, that
// nobody has to copy or keep, and that a CUDA graph holds with the launch.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

constexpr int READ = 2 + STATES;                 // p, g and the state
constexpr int WRITTEN = 1 + STATES + HAS_COPY;   // p, the state, and p once more in fewer bits
constexpr int GRADIENT = 1;                      // place among those that are read
constexpr int CHUNK = THREADS * PACKS * VECTOR;  // elements

struct Addresses {
    void* read[TENSORS][READ];
    void* written[TENSORS][WRITTEN];
};

struct Chunks {
    int first[TENSORS];  // chunk of each tensor among those of all
    int size[TENSORS];   // elements
};

struct Meeting {  // zeros before the first launch and after the last
    u32 not_finite;
    u32 tickets;
};

struct Chunk {
    int tensor;
    long long begin;  // element of the tensor
    int count;

    // The last tensor that begins no later than this block.
    __device__ __forceinline__ explicit Chunk(const Chunks& chunks) : tensor(0) {
#pragma unroll
        for (int step = TENSORS_ROUNDED; step > 0; step /= 2)
            if (tensor + step < TENSORS && chunks.first[tensor + step] <= static_cast<int>(blockIdx.x)) tensor += step;
        begin = 1LL * (blockIdx.x - chunks.first[tensor]) * CHUNK;
        const long long left = chunks.size[tensor] - begin;
        count = left < CHUNK ? static_cast<int>(left) : CHUNK;
    }
};

__device__ __forceinline__ bool is_aligned(const void* address) {
    return reinterpret_cast<unsigned long long>(address) % 16 == 0;
}
