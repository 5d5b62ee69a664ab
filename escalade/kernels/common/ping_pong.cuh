// Ping-pong of two warpgroups over tiles. A turn ends once its stages have arrived and its MMAs are issued.
#pragma once

#include "common/hopper.cuh"

struct PingPong {
    const u32 barriers;  // one per consumer
    const int consumer;
    u32 parity;

    __device__ __forceinline__ PingPong(u32 barriers, int consumer)
        : barriers(barriers), consumer(consumer), parity(consumer == 0) {}  // the first turn is free

    __device__ __forceinline__ static void init(u32 barriers) {
        for (int consumer = 0; consumer < 2; ++consumer) barrier_init(barriers + consumer * 8, 4);
    }
    __device__ __forceinline__ void wait() {
        barrier_wait(barriers + consumer * 8, parity);
        parity ^= 1;
    }
    __device__ __forceinline__ void pass() const {
        if (threadIdx.x % 32 == 0) barrier_arrive(barriers + (1 - consumer) * 8);
    }
};
