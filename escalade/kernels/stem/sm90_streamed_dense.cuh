// Order of k for 3-channel pixels with a stride of two, with little padding.
//
// wgmma takes k in 16-byte chunks, 8 values, and those of adjacent windows must be 16 bytes apart. So the two pixels
// that a window moves by are a slot of 8 values: their 6, and channels 0 and 1 of the preceding pixel.
//
//   slot p of a row: pixel 2p channels 0 1 | pixel 2p + 1 channels 0 1 | channel 2 of both | pixel 2p - 1 channels 0 1
//
// A filter row of 2 * SLOTS_IN_ROW + 1 taps is its first tap and SLOTS_IN_ROW slots; the first slot also has channels 0
// and 1 of the first tap. Channel 2 of the first tap of all filter rows is one more chunk, the window's `corner`: up to
// 7 rows, and a one that the bias is multiplied by. So 7x7 taps take 22 chunks, 11 steps; pixels of 4 channels and rows
// of 8 taps take 14.
//
// In later slots the preceding pixel appears twice: each copy has half of the weight. Zero and the whole weight would
// do, except for infinite pixels.
//
// The prelude of the including file defines FILTER_HEIGHT (at most 7) and FILTER_WIDTH (odd).
#pragma once

constexpr int SLOTS_IN_ROW = (FILTER_WIDTH - 1) / 2;
constexpr int STEPS = FILTER_HEIGHT * SLOTS_IN_ROW / 2 + 1;
constexpr int ROW_PAIRS = (FILTER_HEIGHT + 1) / 2;  // per window
constexpr int CORNER = -1;

struct Chunk {
    int row;   // of the filter, or CORNER
    int slot;  // of the row
};

// The two chunks of a step are of one row, or the same slot of both rows of a pair, or a slot of the last row and the
// corner; if no chunk is left to pair with the corner, it appears twice.
__device__ __forceinline__ constexpr Chunk chunk_of(int step, int half) {
    constexpr int STEPS_OF_ROW = SLOTS_IN_ROW / 2;
    const int first_row = step / SLOTS_IN_ROW * 2, in_pair = step % SLOTS_IN_ROW;
    const int rows = FILTER_HEIGHT - first_row < 2 ? FILTER_HEIGHT - first_row : 2;
    const bool second = in_pair >= STEPS_OF_ROW;
    if (in_pair < rows * STEPS_OF_ROW) return {first_row + second, (in_pair - second * STEPS_OF_ROW) * 2 + half};
    if (SLOTS_IN_ROW % 2 && half < rows) return {first_row + half, SLOTS_IN_ROW - 1};
    return {CORNER, 0};
}

constexpr bool LONE_CORNER = FILTER_HEIGHT * SLOTS_IN_ROW % 2 == 0;
