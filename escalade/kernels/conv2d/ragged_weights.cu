// packed[segment][step][block of 8 filters][lane][register] = weight[filter][segment][k], 0 where there is none
//
// Weights of `conv2d/ragged.cu` in mma.sync fragment order, two registers per lane, packed once before the first call.
// conv2d/ragged.cuh defines segments and steps.
// Limiter: memory.
//
// Rung: `ragged`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr int CHANNELS = 8;       // problem.channels
constexpr int FILTER_HEIGHT = 3;  // problem.filter_height
constexpr int FILTER_WIDTH = 3;   // problem.filter_width
constexpr int DILATION_W = 1;     // problem.dilation[1]
constexpr int GAP = 8;            // gap
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "conv2d/ragged.cuh"

extern "C" __global__ void conv2d_ragged_weights(const Element* __restrict__ weight, Element* __restrict__ packed,
                                                 int filters, int blocks) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    const int in_lane = at % LANE, lane = at / LANE % 32;
    long long rest = at / LANE / 32;
    const int filter = rest % blocks * 8 + lane / 4;
    rest /= blocks;
    const int k = rest % STEPS * STEP + lane % 4 * LANE + in_lane;
    const int segment = rest / STEPS;
    if (segment >= SEGMENTS) return;
    const bool exists = filter < filters && k < LENGTH;
    packed[at] = exists ? weight[(1LL * filter * SEGMENTS + segment) * LENGTH + k] : from_float<Element>(0.f);
}
