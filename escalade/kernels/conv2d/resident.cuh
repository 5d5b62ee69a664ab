// How k and the filters are cut where weights stay in shared memory and pixels go straight to registers.
//
// Filters are the rows of mma.sync and pixels its columns. The order of a sum is free, and so is the order of rows. So each
// of the four lanes that share a pixel loads 16 bytes of its channels at once, its operands for two steps of the product:
// BLOCK channels together. And each of the eight lanes that share a pixel's results has neighbouring filters of them, 16
// bytes from GROUP blocks of 16, and stores these at once. The weights are packed to match.
#pragma once

constexpr int WORD = 4 / sizeof(Element);   // elements of a register
constexpr int LANE = 16 / sizeof(Element);  // channels that a lane loads at once
constexpr int BLOCK = 4 * LANE;             // channels of a block, two steps
constexpr int BLOCKS = (CHANNELS + BLOCK - 1) / BLOCK;
constexpr int ROUNDS = (BLOCKS + DEPTH - 1) / DEPTH;  // of DEPTH blocks, which a warp has under way at once
// The last block is one step, for which lanes load 8 bytes, where no more are needed and all blocks are under way at once.
constexpr bool HALF = ROUNDS == 1 && CHANNELS % BLOCK != 0 && CHANNELS % BLOCK <= BLOCK / 2;
constexpr int STEPS = 2 * ROUNDS * DEPTH - HALF;
constexpr int STEP_WORDS = FILTER_BLOCKS * 32 * 4;  // of the weights that a step takes
constexpr int COLUMN_WORDS = STEPS * STEP_WORDS;    // of those that a block of threads has
constexpr int ROUND_WORDS = COLUMN_WORDS / ROUNDS;

constexpr int GROUP = 2 * WORD;  // blocks of 16 filters of which a lane has 16 bytes of results

// What is left at the end of FILTER_BLOCKS is taken in twos and ones: the width of the group that begins with a block.
__host__ __device__ constexpr int width_from(int first) {
    const int left = FILTER_BLOCKS - first;
    return left >= 4 && GROUP >= 4 ? 4 : left >= 2 ? 2 : 1;
}

__host__ __device__ constexpr int group_of(int block) {  // the first block of the group that it is in
    int first = 0;
    while (first + width_from(first) <= block) first += width_from(first);
    return first;
}

// The filter that is row `row` of a block's product: lanes have two rows, eight apart, of each block.
__host__ __device__ constexpr int filter_of(int block, int row) {
    const int first = group_of(block);
    return first * 16 + row % 8 * 2 * width_from(first) + (block - first) * 2 + row / 8;
}
