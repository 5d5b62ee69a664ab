// Ring of smem stages between one producer thread, which issues copies into them, and consumer warps. Each stage has
// two mbarriers: `full` (its copies have arrived) and `empty` (all consumers have released it).
#pragma once

#include "common/hopper.cuh"

template <int STAGES, int STAGE_BYTES>
struct Ring {
    static_assert(STAGE_BYTES % 1024 == 0, "the swizzle repeats every 1024 bytes");
    static constexpr int STAGE = STAGE_BYTES;
    static constexpr int BYTES = STAGES * (STAGE_BYTES + 16);  // stages, then their barriers

    u32 stages;      // address of the first
    u32 barriers;    // likewise
    int stage = 0;   // next one
    u32 parity = 0;  // flips every lap

    __device__ __forceinline__ explicit Ring(u32 stages) : Ring(stages, stages + STAGES * STAGE_BYTES) {}
    __device__ __forceinline__ Ring(u32 stages, u32 barriers) : stages(stages), barriers(barriers) {}

    // Called by one thread, before a CTA barrier. `writers` arrivals fill a stage, `readers` release it.
    __device__ __forceinline__ void init(u32 readers, u32 writers = 1) const {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full(i), writers);
            barrier_init(empty(i), readers);
        }
    }

    __device__ __forceinline__ u32 address() const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 full(int stage) const { return barriers + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return full(stage) + 8 * STAGES; }

    __device__ __forceinline__ void wait_full() const { barrier_wait(full(stage), parity); }
    // In the first lap all stages are empty.
    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(stage), parity ^ 1); }

    // One lane arrives for its warp: all lanes have waited for the same data.
    __device__ __forceinline__ void release(int stage) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty(stage));
    }

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }

    // Skips the stages of another consumer. A parity cannot tell a lap from the one after next: skip only once the
    // skipped stages are known to have been waited for.
    __device__ __forceinline__ void skip(int steps) {
        const int to = stage + steps;
        parity ^= to / STAGES & 1;
        stage = to % STAGES;
    }
};
