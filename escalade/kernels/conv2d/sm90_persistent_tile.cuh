// Tiles of sm90_persistent.cu and their smem layout; the opening of that file explains the switches.
#pragma once

#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                  // windows.dtype
using Output = float;                   // epilogue.output
using Bias = float;                     // "fp32" if windows.element_bytes == 1 else epilogue.output
constexpr int WG_PIXELS = 64;           // config.warpgroup_tile[0]
constexpr int WG_FILTERS = 64;          // config.warpgroup_tile[1]
constexpr int SHARE = 0;                // share: of two warpgroups: 0 ping-pong, 1 pixels, 2 filters, 3 depth
constexpr bool SWAPPED = false;         // config.swapped: filters are M of the product
constexpr int STAGES = 4;               // config.stages
constexpr int BUFFERS = 0;              // config.buffers: staging tiles per warpgroup
constexpr int CLUSTER = 1;              // config.cluster: CTAs that share weights by multicast
constexpr int SPLITS = 1;               // config.splits: CTAs that share the sum of a tile
constexpr bool PARTS_APART = true;      // config.parts_apart: partial sums do not overwrite the stages
constexpr bool PROMOTED = false;        // config.promote > 0: promote sums to fp32 registers
#define PROMOTE 1                       // config.promote: k-tiles between two promotions
constexpr bool SHORTCUT = false;        // shortcut is not None
constexpr bool PLACED = false;          // placed: y is spread over a larger image
constexpr int CLASSES = 1;              // phases: sub-pixel phases
constexpr bool MN_MAJOR = false;        // windows.mn_major is not None
#define VOLUMES 0         // int(windows.frames is not None): a macro, as constants are part of the machine code for images too
#define FRAMES 1          // windows.frames.output if windows.frames else 1: frames of y per volume
#define FRAME_ROWS 1      // windows.taps[0] if windows.frames else 1: rows of taps per frame
#define FRAME_STRIDE 1    // windows.frames.stride if windows.frames else 1
#define FRAME_PAD 0       // windows.frames.padding if windows.frames else 0
#define FRAME_DILATION 1  // windows.frames.dilation if windows.frames else 1
#define PERMUTED 0                      // int(permuted): the filters of a tile are in the order of 16 adjacent per lane
constexpr bool FILTERS_ALIGNED = true;  // filters % config.filters == 0
constexpr bool FILTERS_EVEN = true;     // filters % 2 == 0
constexpr bool HAS_BIAS = false;        // epilogue.bias
constexpr bool HAS_RESIDUAL = false;    // epilogue.residual
constexpr bool HAS_RELU = false;        // epilogue.relu
constexpr bool HAS_MASK = false;        // epilogue.mask
#endif

#include "common/ring.cuh"
#include "common/wgmma_widths.cuh"
#include "conv2d/finish.cuh"
#include "conv2d/pixel_classes.cuh"
#include "conv2d/shared_sum.cuh"

constexpr int ROW_BYTES = 128;  // swizzle span
constexpr int K_TILE = ROW_BYTES / sizeof(Element);
constexpr bool PING_PONG = SHARE == 0, DEPTH = SHARE == 3;
constexpr int TILE_PIXELS = WG_PIXELS * (SHARE == 1 ? 2 : 1);
constexpr int TILE_FILTERS = WG_FILTERS * (SHARE == 2 ? 2 : 1);
constexpr int PIXEL_BYTES = TILE_PIXELS * ROW_BYTES;
constexpr int STAGE_BYTES = PIXEL_BYTES + TILE_FILTERS * ROW_BYTES;
constexpr int WG_ROWS = SWAPPED ? WG_FILTERS : WG_PIXELS;
constexpr int COLUMNS = SWAPPED ? WG_PIXELS : WG_FILTERS;
constexpr int ATOMS = WG_ROWS / 64;  // 64-row MMAs per warpgroup
constexpr int CLUSTER_BLOCKS = CLUSTER * SPLITS;
constexpr int PARTS = SPLITS * (DEPTH ? 2 : 1);  // partial sums per output tile
constexpr int THREADS = 384;

// Results are staged in tiles of 64 pixels by 64 filters, stored as boxes of 128 bytes per pixel.
constexpr int BOX_BYTES = 64 * ROW_BYTES;
constexpr int BOX_FILTERS = ROW_BYTES / sizeof(Output);
constexpr int BOXES = sizeof(Output) / 2;
constexpr int STAGING_BYTES = BOXES * BOX_BYTES;
constexpr int STAGING_TILES_PER_ATOM = COLUMNS / 64;
constexpr int STAGING_TILES = ATOMS * STAGING_TILES_PER_ATOM;

static_assert(BUFFERS == 0 || (STAGING_TILES % BUFFERS == 0 && sizeof(Output) >= 2),
              "buffers divide the staging tiles");
static_assert(BUFFERS > 0 || !SWAPPED, "direct stores need pixels as rows");
static_assert(PARTS == 1 || (!PING_PONG && CLUSTER == 1 && BUFFERS == 0), "split-K needs both warpgroups on one tile");
static_assert(!PROMOTED || (!DEPTH && ATOMS * COLUMNS <= 128), "accumulators are held twice");
static_assert(!DEPTH || STAGES % 2 == 0, "warpgroups alternate stages");
static_assert(CLASSES == 1 || (PLACED && CLUSTER == 1 && !SHORTCUT), "phases are placed in y");
static_assert(!VOLUMES || (CLASSES == 1 && !SHORTCUT && !PLACED), "volumes are stored as computed");
static_assert(!MN_MAJOR || (WG_FILTERS % 64 == 0 && CLUSTER == 1 && !SHORTCUT),
              "MN-major weights come in blocks of 64 filters");

using Stages = Ring<STAGES, STAGE_BYTES>;  // pixels, then weights
using Sum = SumOf<Element>::Type;
using Accumulators = Sum[ATOMS][COLUMNS / 2];

// Pieces of 64 pixels by 8 filters. With SHARE 3 both warpgroups hold parts of the same accumulators, else each its
// own.
using Parts = SharedSum<ATOMS * COLUMNS / 8, PARTS, DEPTH ? 2 : 1, Sum>;
constexpr int PARTS_BYTES = (DEPTH ? 1 : 2) * Parts::BYTES;
static_assert(PARTS == 1 || PARTS_APART || PARTS_BYTES <= STAGES * STAGE_BYTES, "the exchange reuses the ring");

struct Maps {
    const TensorMap &pixels, &weights, &shortcut, &shortcut_weights;
};

struct Problem {
    ConvShape shape;
    const Phases& phases;
    int pixels, tiles_m, tiles_n, tiles, tap_k_tiles, shortcut_k_tiles;

    __device__ __forceinline__ Problem(const ConvShape& shape, const Phases& phases, int shortcut_channels)
        : shape(shape), phases(phases) {
        pixels = shape.batch * shape.output_height * shape.output_width;
        tiles_n = (shape.filters + TILE_FILTERS - 1) / TILE_FILTERS;
        tiles_m = ((pixels + TILE_PIXELS - 1) / TILE_PIXELS + CLUSTER - 1) / CLUSTER;
        tiles = CLASSES * tiles_m * tiles_n;
        tap_k_tiles = (shape.channels + K_TILE - 1) / K_TILE;
        shortcut_k_tiles = SHORTCUT ? (shortcut_channels + K_TILE - 1) / K_TILE : 0;
    }

    // Taps of a phase's filter.
    __device__ __forceinline__ int taps_h(int phase) const {
        return CLASSES > 1 ? phases.of[phase].taps_h : shape.filter_height;
    }
    __device__ __forceinline__ int taps_w(int phase) const {
        return CLASSES > 1 ? phases.of[phase].taps_w : shape.filter_width;
    }

    // K-tiles of an output tile, and the range of them that one CTA of a split computes.
    __device__ __forceinline__ int k_tiles(int phase) const {
        return taps_h(phase) * taps_w(phase) * tap_k_tiles + shortcut_k_tiles;
    }
    __device__ __forceinline__ int first_k_tile(int phase, u32 rank) const {
        return SPLITS == 1 ? 0 : k_tiles(phase) * rank / SPLITS;
    }
    __device__ __forceinline__ int end_k_tile(int phase, u32 rank) const {
        return SPLITS == 1 ? k_tiles(phase) : k_tiles(phase) * (rank + 1) / SPLITS;
    }
    __device__ __forceinline__ int cta_k_tiles(int phase, u32 rank) const {
        return end_k_tile(phase, rank) - first_k_tile(phase, rank);
    }
};

struct Tile {
    int pixel, filter, phase = 0;

    // Tiles over the same pixels are consecutive, so x is read from DRAM once. The CTAs of a cluster take adjacent
    // pixels; past the last pixel TMA fills zeros and nothing is stored.
    __device__ __forceinline__ Tile(const Problem& problem, int index, u32 rank) {
        int m = index / problem.tiles_n;
        // Phases alternate over as many pixels as the grid covers at once. Every CTA then gets equally many tiles of
        // each phase (some have more taps), and their part of x stays in L2 from the first phase to the last.
        if constexpr (CLASSES > 1) {
            const int round = min(problem.tiles_m, max(1, int(gridDim.x) / CLUSTER_BLOCKS / problem.tiles_n));
            const int first = m / (CLASSES * round) * round, here = min(round, problem.tiles_m - first);
            m -= CLASSES * first;
            phase = m / here;
            m = first + m % here;
        }
        pixel = (m * CLUSTER + (CLUSTER > 1 ? rank : 0)) * TILE_PIXELS;
        filter = index % problem.tiles_n * TILE_FILTERS;
    }
};
