// What the tensor-core convolution of few channels and the packing of its weights agree on: which filter, tap and
// channel each element of a fragment stands for.
//
// The product's rows are pairs of neighbouring output pixels, its columns (offset in the pair, filter), and k runs over
// the pixels that both windows see: FILTER_WIDTH + 1 of each filter row, padded to 8 pixels (or 4), those outside an
// offset's window with zeros for weights. With four channels a pixel (fewer are padded) a step of 16 is four pixels of
// one filter row. With one channel it is eight pixels of two rows that lie below each other; there are two sets of
// fragments then, for output rows that begin at the upper of two rows and at the lower, so that each row of pixels is
// the same half of the same registers for all output rows.
//
// A unit is what a warp computes: TILES_N blocks of eight columns, of one offset or of both.
//
// The including file's prelude defines CHANNELS (at most 4), FILTERS, FILTER_HEIGHT and FILTER_WIDTH (at most 7),
// PAIRED (a lane has both offsets of its filters: pooling, and NCHW), TILES_N and SPLIT (operands in two halves).
#pragma once

constexpr bool SINGLE = CHANNELS == 1;
constexpr int PIXEL = SINGLE ? 1 : 4;  // elements
constexpr int ROW_STEPS = (FILTER_WIDTH + 4) / 4;           // of a filter row, four pixels of four channels each
constexpr int ROW_PAIR_STEPS = (FILTER_HEIGHT + 2) / 2;     // of one channel, two filter rows each
constexpr int FRAGMENTS = SINGLE ? 2 * ROW_PAIR_STEPS : FILTER_HEIGHT * ROW_STEPS;
constexpr int SETS = SPLIT ? 2 : 1;                         // the upper halves of all, then the lower
constexpr int PACKED = (SETS * FRAGMENTS * TILES_N * 2 + 3) / 4;  // loads of 16 bytes a lane
constexpr bool FEW_FILTERS = !PAIRED && FILTERS <= 4;       // both offsets side by side in one block of columns
static_assert(CHANNELS <= 4 && FILTER_HEIGHT <= 7 && FILTER_WIDTH <= 7, "what fits in registers");
static_assert(!FEW_FILTERS || TILES_N == 1, "one block of columns has them all");

constexpr int UNIT_FILTERS = PAIRED || FEW_FILTERS ? 4 * TILES_N : 8 * TILES_N;
constexpr int UNITS = (FILTERS + UNIT_FILTERS - 1) / UNIT_FILTERS * (PAIRED || FEW_FILTERS ? 1 : 2);

// Filters of a lane, in a register of sums: with both offsets in two neighbouring sums the filters of its blocks are
// neighbours, otherwise those of all its sums.
constexpr int LANE_FILTERS = PAIRED ? TILES_N : 2 * TILES_N;

__device__ __forceinline__ int first_filter(int unit, int member) {
    if (PAIRED) return unit * UNIT_FILTERS + LANE_FILTERS * member;
    if (FEW_FILTERS) return 2 * (member % 2);
    return unit / 2 * UNIT_FILTERS + LANE_FILTERS * member;
}

// The offset of the pixel in its pair; where PAIRED, sum 2 * t has offset 0 and its neighbour offset 1.
__device__ __forceinline__ int lane_offset(int unit, int member) {
    if (PAIRED) return 0;
    return FEW_FILTERS ? member / 2 : unit % 2;
}
