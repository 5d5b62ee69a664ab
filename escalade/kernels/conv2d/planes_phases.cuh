// Order of a transposed convolution's filters: a plane of y has PHASES_H * PHASES_W, one for each phase. Two phases of
// columns are two filters apart, which are adjacent lanes' in an accumulator, so that a warp stores adjacent columns.
#pragma once

struct Phase {
    int plane, row, column;
};

__device__ __forceinline__ Phase phase_of(int filter) {
    if (PHASES_W == 2 && PHASES_H == 1) return {filter / 4 * 2 + filter % 2, 0, filter / 2 % 2};
    if (PHASES_W == 2 && PHASES_H == 2) return {filter / 4, filter % 2, filter / 2 % 2};
    return {filter / (PHASES_H * PHASES_W), filter / PHASES_W % PHASES_H, filter % PHASES_W};
}
