// packed[step][block][lane] = the weights in mma fragment order, 16 filters by 16 values of k
//
// A k-step is 4 adjacent taps of a filter row by 4 channels; missing taps and channels are zero. Which tap and channel
// a lane holds is free, as long as the pixels' fragments agree:
//   PIXEL_A_LANE: lane member m holds all channels of tap STEPS_IN_ROW * m + (step in the row)
//   otherwise     memory order, tap by tap, as wgmma reads pixels: chunks of two taps by 4 channels
// Rows `group` and `group` + 8 of a warp's blocks are adjacent filters, and so are the blocks' rows of one group: a
// lane's results of one pixel are then contiguous in y. Limiter: one launch, once per network.
//
// Rungs                  switches
//   tensor_core, pooled  PIXEL_A_LANE
//   warpgroup            none

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = __half;              // problem.storage
constexpr int CHANNELS = 3;          // problem.channels
constexpr int FILTER_HEIGHT = 7;     // problem.filter_height
constexpr int FILTER_WIDTH = 7;      // problem.filter_width
constexpr int WARP_BLOCKS = 2;       // warp_blocks
constexpr bool PIXEL_A_LANE = true;  // pixel_a_lane
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

constexpr int STEPS_IN_ROW = (FILTER_WIDTH + 3) / 4;

extern "C" __global__ void stem_pack(const Element* __restrict__ weight, Element* __restrict__ packed, int elements,
                                     int blocks) {
    wait_for_previous_launch();
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    const int half = at % 2, number = at / 2 % 4, lane = at / 8 % 32;
    const int block = at / 256 % blocks, step = at / 256 / blocks;
    const int group = lane / 4, member = lane % 4;
    const int r = step / STEPS_IN_ROW, step_in_row = step % STEPS_IN_ROW;
    const int s = PIXEL_A_LANE ? STEPS_IN_ROW * member + step_in_row : 4 * step_in_row + number / 2 * 2 + member / 2;
    const int c = (PIXEL_A_LANE ? number / 2 : member % 2) * 2 + half;
    const int warp = block / WARP_BLOCKS, block_in_warp = block % WARP_BLOCKS;
    const int filter = 16 * WARP_BLOCKS * warp + 2 * WARP_BLOCKS * group + 2 * block_in_warp + number % 2;
    const bool exists = s < FILTER_WIDTH && c < CHANNELS;
    packed[at] = exists ? weight[((filter * CHANNELS + c) * FILTER_HEIGHT + r) * FILTER_WIDTH + s]
                        : from_float<Element>(0.f);
}
