// Fragment layout shared by the tensor-core convolution of few channels and the packing of its weights: the filter, tap
// and channel of each element.
//
// The rows of the product are pairs of adjacent output pixels, its columns (offset in the pair, filter), and k the
// pixels that both windows read: FILTER_WIDTH + 1 per filter row, padded to 8 (or 4) pixels; pixels outside an offset's
// window have zero weights. With four channels per pixel (fewer are padded), a k-step of 16 is four pixels of one
// filter row. With one channel it is eight pixels of two vertically adjacent rows. There are then two sets of
// fragments, for output rows that begin at the upper and at the lower row, so that each row of pixels is the same half
// of the same registers for all output rows.
//
// A unit is the work of a warp: TILES_N blocks of eight columns, of one offset or of both.
//
// The prelude of the including file defines CHANNELS (at most 4), FILTERS, FILTER_HEIGHT and FILTER_WIDTH (at most 7),
// PAIRED (a lane has both offsets of its filters: pooling, and NCHW), TILES_N and SPLIT (operands in two halves).
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int CHANNELS = 1;       // problem.channels
constexpr int FILTERS = 1;        // problem.filters
constexpr int FILTER_HEIGHT = 3;  // problem.filter_height
constexpr int FILTER_WIDTH = 3;   // problem.filter_width
constexpr bool PAIRED = true;     // columns.paired: a lane has both pixels of a pair
constexpr int TILES_N = 2;        // columns.tiles_n: 8-column blocks per warp
constexpr bool SPLIT = false;     // columns.split: fp32 as two fp16 halves
#endif

constexpr bool SINGLE = CHANNELS == 1;
constexpr int PIXEL = SINGLE ? 1 : 4;  // elements
constexpr int ROW_STEPS = (FILTER_WIDTH + 4) / 4;        // per filter row, four pixels of four channels each
constexpr int ROW_PAIR_STEPS = (FILTER_HEIGHT + 2) / 2;  // with one channel, two filter rows each
constexpr int FRAGMENTS = SINGLE ? 2 * ROW_PAIR_STEPS : FILTER_HEIGHT * ROW_STEPS;
constexpr int SETS = SPLIT ? 2 : 1;                               // upper halves of all, then lower
constexpr int PACKED = (SETS * FRAGMENTS * TILES_N * 2 + 3) / 4;  // 16-byte loads per lane
constexpr bool FEW_FILTERS = !PAIRED && FILTERS <= 4;             // both offsets share one block of columns
static_assert(CHANNELS <= 4 && FILTER_HEIGHT <= 7 && FILTER_WIDTH <= 7, "weights fit in registers");
static_assert(!FEW_FILTERS || TILES_N == 1, "they fit one block of columns");

constexpr int UNIT_FILTERS = PAIRED || FEW_FILTERS ? 4 * TILES_N : 8 * TILES_N;
constexpr int UNITS = (FILTERS + UNIT_FILTERS - 1) / UNIT_FILTERS * (PAIRED || FEW_FILTERS ? 1 : 2);

// Filters per lane: with both offsets in two adjacent accumulators, those of its blocks are adjacent; otherwise those
// of all its accumulators.
constexpr int LANE_FILTERS = PAIRED ? TILES_N : 2 * TILES_N;

__device__ __forceinline__ int first_filter(int unit, int member) {
    if (PAIRED) return unit * UNIT_FILTERS + LANE_FILTERS * member;
    if (FEW_FILTERS) return 2 * (member % 2);
    return unit / 2 * UNIT_FILTERS + LANE_FILTERS * member;
}

// Offset of the pixel in its pair; if PAIRED, accumulator 2 * t has offset 0 and the next one offset 1.
__device__ __forceinline__ int lane_offset(int unit, int member) {
    if (PAIRED) return 0;
    return FEW_FILTERS ? member / 2 : unit % 2;
}
