// Columns of a block of a row in the registers of a warp, for MMAs.
//
// A warp holds 16 rows. A block of columns is divided into steps of 16; in a step the four lanes of a quad (member =
// lane % 4) hold four columns each of rows lane / 4 and lane / 4 + 8. Which four is free, as long as the weights are
// packed to match: a lane's columns of two steps are eight adjacent ones, so that rows are loaded and stored 16 bytes
// at a time, and the accumulators of one MMA are the operand of the next in place, without a trip through smem.
#pragma once

__host__ __device__ constexpr int steps_of(int columns) { return (columns + 15) / 16; }

// Column of element `e` (0 to 3) of a lane's share of a step; in an unpaired last step a lane has four adjacent ones.
__host__ __device__ constexpr int column_of(int columns, int step, int member, int e) {
    const bool paired = (step | 1) < steps_of(columns);
    return paired ? step / 2 * 32 + member * 8 + step % 2 * 4 + e : step * 16 + member * 4 + e;
}
