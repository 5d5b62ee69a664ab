// Division of k into MMA steps where windows are stored in smem pixel by pixel.
//
// Without a gap between pixels, an output pixel reads one contiguous run per row: FILTER_WIDTH * CHANNELS elements, or
// CHANNELS per tap if columns are dilated or pixels are apart. Such a *segment* is divided into MMA k-steps; only its
// last is zero-padded. Each lane holds LANE adjacent elements per step, and the weights are packed in the same order.
#pragma once

constexpr bool JOINED = DILATION_W == 1 && GAP == 0;  // the taps of a row are contiguous
constexpr int SEGMENTS = JOINED ? FILTER_HEIGHT : FILTER_HEIGHT * FILTER_WIDTH;
constexpr int LENGTH = JOINED ? FILTER_WIDTH * CHANNELS : CHANNELS;
constexpr int STEP = 32 / sizeof(Element), LANE = STEP / 4;
constexpr int STEPS = (LENGTH + STEP - 1) / STEP;
