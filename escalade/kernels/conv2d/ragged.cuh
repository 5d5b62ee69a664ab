// How k is cut where windows lie in shared memory pixel by pixel.
//
// Without a gap between pixels, what an output pixel sees of one row is one run of elements: FILTER_WIDTH * CHANNELS of
// them, or CHANNELS for each tap where columns are dilated or pixels lie apart. Such a *segment* is cut into steps
// of a product, and only its last one is padded, with zeros. Of a step each lane holds LANE neighbours, and the weights
// are packed in the same order.
#pragma once

constexpr bool JOINED = DILATION_W == 1 && GAP == 0;  // the taps of a row are neighbours
constexpr int SEGMENTS = JOINED ? FILTER_HEIGHT : FILTER_HEIGHT * FILTER_WIDTH;
constexpr int LENGTH = JOINED ? FILTER_WIDTH * CHANNELS : CHANNELS;
constexpr int STEP = 32 / sizeof(Element), LANE = STEP / 4;
constexpr int STEPS = (LENGTH + STEP - 1) / STEP;
