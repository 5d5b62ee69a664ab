// The producer of a persistent block, one thread: it copies the slabs of tile after tile into the ring.
#pragma once

#include "conv2d/sm90_persistent_tile.cuh"

// A walk over the slabs of a sum: all channels of a tap, then the next tap, at last the shortcut's channels.
struct Walk {
    int tap, c, r, s;

    __device__ __forceinline__ Walk(const Problem& problem, int slab) {
        const ConvShape& shape = problem.shape;
        const int taps = shape.filter_height * shape.filter_width;
        tap = min(slab / problem.tap_slabs, taps);
        c = (slab - tap * problem.tap_slabs) * SLAB;
        r = tap / shape.filter_width;
        s = tap % shape.filter_width;
    }

    __device__ __forceinline__ bool in_shortcut(const ConvShape& shape) const {
        return SHORTCUT && r == shape.filter_height;
    }

    __device__ __forceinline__ void next(const ConvShape& shape) {
        c += SLAB;
        if (in_shortcut(shape) || c < shape.channels) return;
        c = 0;
        ++tap;
        if (++s == shape.filter_width) {
            s = 0;
            ++r;
        }
    }
};

struct Copier {
    const Problem& problem;
    const Maps& maps;
    const int shortcut_stride;
    const u32 rank;

    __device__ __forceinline__ void copy_weights(const Stages& ring, const Walk& walk, int filter) const {
        const bool shortcut = walk.in_shortcut(problem.shape);
        const TensorMap& map = shortcut ? maps.shortcut_weights : maps.weights;
        const u32 to = ring.address() + PIXEL_BYTES, full = ring.full(ring.stage);
        const int tap = shortcut ? 0 : walk.tap;
        if constexpr (MN_MAJOR) {
            const ConvShape& shape = problem.shape;
#pragma unroll
            for (int block = 0; block < TILE_FILTERS; block += 64)
                tma_load_4d(to + block * ROW_BYTES, map, full, filter + block, shape.filter_width - 1 - walk.s,
                            shape.filter_height - 1 - walk.r, walk.c);
        } else if constexpr (CLUSTER > 1) {
            constexpr int PART = TILE_FILTERS / CLUSTER;
            tma_load_3d_multicast(to + rank * PART * ROW_BYTES, map, full, walk.c, tap, filter + rank * PART,
                                  (1 << CLUSTER) - 1);
        } else {
            tma_load_3d(to, map, full, walk.c, tap, filter);
        }
    }

    // The weights of the first stages, which have never been used; says how many.
    __device__ __forceinline__ int copy_ahead(Stages ring, int index) const {
        const int first_slab = problem.first_slab(rank), count = min(problem.last_slab(rank) - first_slab, STAGES);
        Walk walk(problem, first_slab);
        const Tile tile(problem, index, rank);
        for (int slab = 0; slab < count; ++slab, ring.next(), walk.next(problem.shape)) {
            barrier_expect(ring.full(ring.stage), STAGE_BYTES);
            copy_weights(ring, walk, tile.filter);
        }
        return count;
    }

    // Copies tile after tile; of the first `ahead` slabs the weights are on their way.
    __device__ __forceinline__ void copy_tiles(Stages ring, int first, int step, int ahead) const {
        const ConvShape& shape = problem.shape;
        const int first_slab = problem.first_slab(rank), last_slab = problem.last_slab(rank);
        for (int index = first; index < problem.tiles; index += step) {
            const Tile tile(problem, index, rank);
            const int row = tile.pixel / shape.output_width;
            const int n = row / shape.output_height;
            const int oh = row % shape.output_height, ow = tile.pixel % shape.output_width;
            const int h = oh * shape.stride_h - shape.pad_h, w = ow * shape.stride_w - shape.pad_w;
            Walk walk(problem, first_slab);
            for (int slab = first_slab; slab < last_slab; ++slab, ring.next(), walk.next(shape)) {
                const u32 full = ring.full(ring.stage);
                if (ahead > 0) {
                    --ahead;
                } else {
                    ring.wait_empty();
                    barrier_expect(full, STAGE_BYTES);
                    copy_weights(ring, walk, tile.filter);
                }
                if (walk.in_shortcut(shape))
                    tma_load_im2col(ring.address(), maps.shortcut, full, walk.c, ow * shortcut_stride,
                                    oh * shortcut_stride, n, 0, 0);
                else
                    tma_load_im2col(ring.address(), maps.pixels, full, walk.c, w, h, n, walk.s * shape.dilation_w,
                                    walk.r * shape.dilation_h);
            }
        }
    }
};
