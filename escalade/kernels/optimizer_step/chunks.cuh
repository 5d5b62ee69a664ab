// Division of a model's tensors into chunks, one per CTA, and the state that CTAs share.
//
// Addresses and sizes are launch parameters: a table in constant memory before the first CTA starts, that needs no copy
// and no lifetime management, and that a CUDA graph stores with the launch.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Gradient = float;             // problem.dtype
constexpr int TENSORS = 2;          // len(group): tensors per launch
constexpr int TENSORS_ROUNDED = 1;  // 1 << (len(group) - 1).bit_length() >> 1: largest power of two below
constexpr int WIDE = 0;             // wide: the last tensors, whose gradients are fp32
constexpr int STATES = 2;           // len(problem.state)
constexpr bool HAS_COPY = false;    // problem.copy != ""
constexpr int VECTOR = 4;           // vector: elements per access
constexpr int PACKS = 2;            // config.packs: accesses in flight per thread and array
constexpr int THREADS = 256;        // config.threads
#endif

constexpr int READ = 2 + STATES;                 // p, g and the state
constexpr int WRITTEN = 1 + STATES + HAS_COPY;   // p, the state, and a lower-precision copy of p
constexpr int GRADIENT = 1;                      // index among the arrays read
constexpr int CHUNK = THREADS * PACKS * VECTOR;  // elements

struct Addresses {
    void* read[TENSORS][READ];
    void* written[TENSORS][WRITTEN];
};

struct Chunks {
    int first[TENSORS];  // chunk of each tensor among those of all
    int size[TENSORS];   // elements
};

struct Meeting {  // zero before the first launch and after the last
    u32 not_finite;
    u32 tickets;
};

struct Chunk {
    int tensor;
    long long begin;  // first element in the tensor
    int count;

    // The last tensor that begins no later than this CTA.
    __device__ __forceinline__ explicit Chunk(const Chunks& chunks) : tensor(0) {
#pragma unroll
        for (int step = TENSORS_ROUNDED; step > 0; step /= 2)
            if (tensor + step < TENSORS && chunks.first[tensor + step] <= static_cast<int>(blockIdx.x)) tensor += step;
        begin = 1LL * (blockIdx.x - chunks.first[tensor]) * CHUNK;
        const long long left = chunks.size[tensor] - begin;
        count = left < CHUNK ? static_cast<int>(left) : CHUNK;
    }
};

__device__ __forceinline__ bool is_wide(const Chunk& chunk) { return WIDE > 0 && chunk.tensor >= TENSORS - WIDE; }

__device__ __forceinline__ bool is_aligned(const void* address) {
    return reinterpret_cast<unsigned long long>(address) % 16 == 0;
}
