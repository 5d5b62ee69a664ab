// Producer of a persistent CTA: one thread copies the k-tiles of all its tiles into the ring.
#pragma once

#include "conv2d/sm90_persistent_tile.cuh"

// Iterator over k-tiles: all channels of a tap, then the next tap, finally the shortcut's channels.
struct Walk {
    const Problem& problem;
    const int phase;
    int tap, c, r, s;

    __device__ __forceinline__ Walk(const Problem& problem, int phase, u32 rank) : problem(problem), phase(phase) {
        const int k_tile = problem.first_k_tile(phase, rank), width = problem.taps_w(phase);
        tap = min(k_tile / problem.tap_k_tiles, problem.taps_h(phase) * width);
        c = (k_tile - tap * problem.tap_k_tiles) * K_TILE;
        r = tap / width;
        s = tap % width;
    }

    __device__ __forceinline__ bool in_shortcut() const { return SHORTCUT && r == problem.shape.filter_height; }

    __device__ __forceinline__ void next() {
        c += K_TILE;
        if (in_shortcut() || c < problem.shape.channels) return;
        c = 0;
        ++tap;
        if (++s == problem.taps_w(phase)) {
            s = 0;
            ++r;
        }
    }

    // Row and column of the tap in weights whose taps are reversed.
    __device__ __forceinline__ int weight_r() const {
        if constexpr (CLASSES == 1) return problem.shape.filter_height - 1 - r;
        return problem.phases.of[phase].tap_h - r * problem.phases.step_h;
    }
    __device__ __forceinline__ int weight_s() const {
        if constexpr (CLASSES == 1) return problem.shape.filter_width - 1 - s;
        return problem.phases.of[phase].tap_w - s * problem.phases.step_w;
    }

    // Index of the tap in flipped weights, which hold all taps of the filter whatever the phase.
    __device__ __forceinline__ int weight_tap() const {
        if constexpr (CLASSES == 1) return tap;
        const ConvShape& shape = problem.shape;
        return shape.filter_height * shape.filter_width - 1 - weight_r() * shape.filter_width - weight_s();
    }

    // Offset of the tap's pixels from the window origin of the launch.
    __device__ __forceinline__ int down() const {
        return r * problem.shape.dilation_h + (CLASSES > 1 ? problem.phases.of[phase].shift_h : 0);
    }
    __device__ __forceinline__ int across() const {
        return s * problem.shape.dilation_w + (CLASSES > 1 ? problem.phases.of[phase].shift_w : 0);
    }
};

struct Copier {
    const Problem& problem;
    const Maps& maps;
    const int shortcut_stride;
    const u32 rank;

    __device__ __forceinline__ void copy_weights(const Stages& ring, const Walk& walk, int filter) const {
        const bool shortcut = walk.in_shortcut();
        const TensorMap& map = shortcut ? maps.shortcut_weights : maps.weights;
        const u32 to = ring.address() + PIXEL_BYTES, full = ring.full(ring.stage);
        const int tap = shortcut ? 0 : walk.weight_tap();
        if constexpr (PERMUTED) {
            tma_load_4d(to, map, full, tap * problem.shape.channels + walk.c, 0, 0, filter / 64);
        } else if constexpr (MN_MAJOR) {
#pragma unroll
            for (int block = 0; block < TILE_FILTERS; block += 64)
                tma_load_4d(to + block * ROW_BYTES, map, full, filter + block, walk.weight_s(), walk.weight_r(),
                            walk.c);
        } else if constexpr (CLUSTER > 1) {
            constexpr int PART = TILE_FILTERS / CLUSTER;
            tma_load_3d_multicast(to + rank * PART * ROW_BYTES, map, full, walk.c, tap, filter + rank * PART,
                                  (1 << CLUSTER) - 1);
        } else {
            tma_load_3d(to, map, full, walk.c, tap, filter);
        }
    }

    // Loads the weights of the first stages, which are empty at the start. Returns their number.
    __device__ __forceinline__ int copy_ahead(Stages ring, int index) const {
        const Tile tile(problem, index, rank);
        const int count = min(problem.cta_k_tiles(tile.phase, rank), STAGES);
        Walk walk(problem, tile.phase, rank);
        for (int k_tile = 0; k_tile < count; ++k_tile, ring.next(), walk.next()) {
            barrier_expect(ring.full(ring.stage), STAGE_BYTES);
            copy_weights(ring, walk, tile.filter);
        }
        return count;
    }

    // Loads all tiles. The weights of the first `ahead` k-tiles are already in flight.
    __device__ __forceinline__ void copy_tiles(Stages ring, int first, int step, int ahead) const {
        const ConvShape& shape = problem.shape;
        for (int index = first; index < problem.tiles; index += step) {
            const Tile tile(problem, index, rank);
            const int row = tile.pixel / shape.output_width;
            const int n = row / shape.output_height;
            const int oh = row % shape.output_height, ow = tile.pixel % shape.output_width;
            const int h = oh * shape.stride_h - shape.pad_h, w = ow * shape.stride_w - shape.pad_w;
            const int k_tiles = problem.cta_k_tiles(tile.phase, rank);
            Walk walk(problem, tile.phase, rank);
            for (int k_tile = 0; k_tile < k_tiles; ++k_tile, ring.next(), walk.next()) {
                const u32 full = ring.full(ring.stage);
                if (ahead > 0) {
                    --ahead;
                } else {
                    ring.wait_empty();
                    barrier_expect(full, STAGE_BYTES);
                    copy_weights(ring, walk, tile.filter);
                }
                if (walk.in_shortcut())
                    tma_load_im2col(ring.address(), maps.shortcut, full, walk.c, ow * shortcut_stride,
                                    oh * shortcut_stride, n, 0, 0);
                else if constexpr (VOLUMES)
                    tma_load_im2col_5d(ring.address(), maps.pixels, full, walk.c, w, h,
                                       n % FRAMES * FRAME_STRIDE - FRAME_PAD, n / FRAMES, walk.across(),
                                       walk.r % FRAME_ROWS * shape.dilation_h, walk.r / FRAME_ROWS * FRAME_DILATION);
                else
                    tma_load_im2col(ring.address(), maps.pixels, full, walk.c, w, h, n, walk.across(), walk.down());
            }
        }
    }
};
