// Where the columns of a block of a row lie in the registers of a warp that multiplies on tensor cores.
//
// A warp holds 16 rows. A block of columns is cut into steps of 16; in a step the four lanes of a quad (member = lane
// % 4) hold four columns each of rows lane / 4 and lane / 4 + 8. Which four is free, as long as the weights are packed
// for it: a lane's columns of two steps are eight neighbours, so that rows are loaded and stored 16 bytes at a time
// and what one product gives is the next one's operand where it stands, without a trip through shared memory.
#pragma once

__host__ __device__ constexpr int steps_of(int columns) { return (columns + 15) / 16; }

// The column of element `e` (0 to 3) of a lane's share of a step; a step without a partner has four neighbours a lane.
__host__ __device__ constexpr int column_of(int columns, int step, int member, int e) {
    const bool paired = (step | 1) < steps_of(columns);
    return paired ? step / 2 * 32 + member * 8 + step % 2 * 4 + e : step * 16 + member * 4 + e;
}
