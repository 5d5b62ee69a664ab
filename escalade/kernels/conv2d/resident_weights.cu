// packed[column][step][block of 16 filters][lane][register] = weight[filter][k], 0 where there is none
//
// Weights of `conv2d/resident.cu` in mma.sync fragment order, rounded in TF32, packed once before the first call.
// conv2d/resident.cuh defines the order of filters and channels.
// Limiter: memory.
//
// Rung: `resident`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr int CHANNELS = 24;      // problem.channels
constexpr int FILTER_BLOCKS = 1;  // config.filter_blocks: 16-filter blocks per CTA
constexpr int DEPTH = 2;          // config.depth: channel blocks in flight per warp
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "conv2d/resident.cuh"

extern "C" __global__ void conv2d_resident_weights(const Element* __restrict__ weight, Element* __restrict__ packed,
                                                   int filters, int columns) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    const int in_word = at % WORD, word = at / WORD % COLUMN_WORDS, column = at / WORD / COLUMN_WORDS;
    if (column >= columns) return;
    const int step = word / STEP_WORDS, filter_block = word / 128 % FILTER_BLOCKS, lane = word / 4 % 32;
    const int row = lane / 4 + word % 2 * 8, high = word / 2 % 2;
    const int loaded = HALF && step == STEPS - 1 ? LANE / 2 : LANE;  // channels per lane and load
    const int channel = step / 2 * BLOCK + lane % 4 * loaded + (step % 2 * 2 + high) * WORD + in_word;
    const int filter = (column * FILTER_BLOCKS) * 16 + filter_of(filter_block, row);
    float value = 0.f;
    if (filter < filters && channel < CHANNELS) value = to_float(weight[1LL * filter * CHANNELS + channel]);
    packed[at] = from_float<Element>(sizeof(Element) == 4 ? __uint_as_float(to_tf32(value)) : value);
}
