// packed[step][block][lane] = the weights in mma fragment order, 16 filters by 16 values of k
//
// k is in the order of sm90_streamed_dense.cuh. Rows `group` and `group` + 8 of a block are adjacent filters: a lane's
// results of one pixel are then contiguous in y. Weights are [K][C][R][S], or [K][R][S][C] with WEIGHTS_NHWC. Limiter:
// one launch, once per network.
//
// Rung: `streamed`. conv2d launches it with WEIGHTS_NHWC for its rung `stem`. Read sm90_streamed_dense.cuh (order of
// k).

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = __half;              // problem.storage
constexpr int FILTER_HEIGHT = 7;     // problem.filter_height
constexpr int FILTER_WIDTH = 7;      // problem.filter_width
constexpr bool WEIGHTS_NHWC = true;  // weights_nhwc
constexpr bool HAS_BIAS = true;      // bias
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "stem/sm90_streamed_dense.cuh"

constexpr int CHANNELS = 3;

// One of the two halves that add up to a weight.
__device__ __forceinline__ Element half_of(Element weight, bool second) {
    const float whole = to_float(weight);
    const Element first = from_float<Element>(0.5f * whole);
    const bool same = to_float(first) == whole;  // zero, or infinite
    return second && !same ? from_float<Element>(whole - to_float(first)) : first;
}

extern "C" __global__ void stem_sm90_streamed_pack(const Element* __restrict__ weight, const Element* __restrict__ bias,
                                           Element* __restrict__ packed, int elements, int blocks) {
    wait_for_previous_launch();
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    const int number = at / 2 % 4, lane = at / 8 % 32, block = at / 256 % blocks, step = at / 256 / blocks;
    const int group = lane / 4, member = lane % 4;
    const int filter = 16 * block + 2 * group + number % 2;
    const int e = 2 * member + at % 2;  // of the chunk
    const Chunk chunk = chunk_of(step, number / 2);

    int r = chunk.row, s, c;
    bool twice, second;
    if (chunk.row == CORNER) {
        r = e, s = 0, c = 2;
        twice = LONE_CORNER, second = number / 2;
    } else {
        const int pixel = e < 4 ? e / 2 : e < 6 ? e - 4 : -1;
        s = 2 * chunk.slot + 1 + pixel, c = e == 4 || e == 5 ? 2 : e % 2;
        twice = c < 2 && s % 2 == 0 && s > 0 && s < FILTER_WIDTH - 1, second = pixel < 0;
    }
    Element value = from_float<Element>(0.f);
    if (r == 7) {
        if (HAS_BIAS) value = bias[filter];
    } else if (r < FILTER_HEIGHT) {
        value = weight[WEIGHTS_NHWC ? ((filter * FILTER_HEIGHT + r) * FILTER_WIDTH + s) * CHANNELS + c
                                    : ((filter * CHANNELS + c) * FILTER_HEIGHT + r) * FILTER_WIDTH + s];
    }
    packed[at] = twice ? half_of(value, second) : value;
}
