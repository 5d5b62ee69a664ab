// Division of k and filters where weights stay in smem and pixels go directly to registers.
//
// Filters are the rows of mma.sync, pixels its columns. The order of a sum is free, and so is the order of rows. So
// each of the four lanes that share a pixel loads 16 bytes of its channels at once, its operands for two k-steps: BLOCK
// channels together. And each of the eight lanes that share a pixel's results holds adjacent filters, 16 bytes from
// GROUP blocks of 16, and stores them at once. The weights are packed to match.
#pragma once

constexpr int WORD = 4 / sizeof(Element);   // elements per register
constexpr int LANE = 16 / sizeof(Element);  // channels per lane and load
constexpr int BLOCK = 4 * LANE;             // channels per block, two k-steps
constexpr int BLOCKS = (CHANNELS + BLOCK - 1) / BLOCK;
constexpr int ROUNDS = (BLOCKS + DEPTH - 1) / DEPTH;  // of DEPTH blocks, which a warp has in flight
// The last block is a single step, with 8-byte loads, if that is enough and all blocks are in flight at once.
constexpr bool HALF = ROUNDS == 1 && CHANNELS % BLOCK != 0 && CHANNELS % BLOCK <= BLOCK / 2;
constexpr int STEPS = 2 * ROUNDS * DEPTH - HALF;
constexpr int STEP_WORDS = FILTER_BLOCKS * 32 * 4;  // words of weights per step
constexpr int COLUMN_WORDS = STEPS * STEP_WORDS;    // words of weights per CTA
constexpr int ROUND_WORDS = COLUMN_WORDS / ROUNDS;

constexpr int GROUP = 2 * WORD;  // blocks of 16 filters that give a lane 16 bytes of results

// Width of the group that begins with a block; the rest of FILTER_BLOCKS is divided into twos and ones.
__host__ __device__ constexpr int width_from(int first) {
    const int left = FILTER_BLOCKS - first;
    return left >= 4 && GROUP >= 4 ? 4 : left >= 2 ? 2 : 1;
}

__host__ __device__ constexpr int group_of(int block) {  // first block of its group
    int first = 0;
    while (first + width_from(first) <= block) first += width_from(first);
    return first;
}

// Filter of row `row` of a block's MMA: lanes hold two rows, eight apart, of each block.
__host__ __device__ constexpr int filter_of(int block, int row) {
    const int first = group_of(block);
    return first * 16 + row % 8 * 2 * width_from(first) + (block - first) * 2 + row / 8;
}
