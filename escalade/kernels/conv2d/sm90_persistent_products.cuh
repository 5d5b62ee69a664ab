// Mainloop of the two consumer warpgroups of a persistent CTA.
#pragma once

#include "conv2d/sm90_persistent_tile.cuh"
#include "conv2d/products.cuh"

__device__ __forceinline__ void release(const Stages& ring, int stage) {
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x % 32 == 0)
            for (u32 rank = 0; rank < CLUSTER; ++rank) barrier_arrive_cluster(ring.empty(stage), rank);
    } else {
        ring.release(stage);
    }
}

__device__ __forceinline__ void multiply_k_tile(Accumulators& acc, const Stages& ring, int first_pixel,
                                                int first_filter, bool accumulate) {
    ring.wait_full();
    const u64 pixels = operand_descriptor(ring.address() + first_pixel * ROW_BYTES);
    const u64 weights = k_tile_descriptor<MN_MAJOR>(ring.address() + PIXEL_BYTES + first_filter * ROW_BYTES);
    const u64 rows = SWAPPED ? weights : pixels, columns = SWAPPED ? pixels : weights;
    constexpr MNMajor WHICH = !MN_MAJOR ? MNMajor::none : SWAPPED ? MNMajor::rows : MNMajor::columns;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < ROW_BYTES / 32; ++step)
#pragma unroll
        for (int i = 0; i < ATOMS; ++i)
            multiply<Element, WHICH>(acc[i], rows + step * STEP<WHICH == MNMajor::rows> + i * (64 * ROW_BYTES >> 4),
                                     columns + step * STEP<WHICH == MNMajor::columns>, accumulate || step);
    wgmma_commit();
}

// A stage is released once the MMAs of the next are issued, so the tensor cores never run dry.
__device__ __forceinline__ void multiply_k_tiles(Accumulators& acc, Stages& ring, int k_tiles, int first_pixel,
                                                 int first_filter) {
    int previous = 0;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        multiply_k_tile(acc, ring, first_pixel, first_filter, k_tile > 0);
        wgmma_wait<1>();
        if (k_tile > 0) release(ring, previous);
        previous = ring.stage;
        if (DEPTH) ring.skip(2);
        else ring.next();
    }
    if (!PING_PONG) {
        wgmma_wait<0>();
        release(ring, previous);
    }
}

__device__ __forceinline__ void add(Accumulators& acc, const Accumulators& part) {
#pragma unroll
    for (int i = 0; i < ATOMS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; ++j) acc[i][j] += part[i][j];
}

// Mainloop with separate accumulators for every PROMOTE k-tiles: while one warpgroup adds them up, the other multiplies.
__device__ __forceinline__ void multiply_promoted(Accumulators& acc, Stages& ring, int k_tiles, int first_pixel,
                                                  int first_filter) {
#pragma unroll
    for (int i = 0; i < ATOMS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; ++j) acc[i][j] = 0.f;
    for (int first = 0; first < k_tiles; first += PROMOTE) {
        Accumulators part;
        for (int k_tile = first; k_tile < min(first + PROMOTE, k_tiles); ++k_tile, ring.next()) {
            multiply_k_tile(part, ring, first_pixel, first_filter, k_tile > first);
            wgmma_wait<0>();
            if (!PING_PONG || k_tile + 1 < k_tiles) release(ring, ring.stage);
        }
        add(acc, part);
    }
}
