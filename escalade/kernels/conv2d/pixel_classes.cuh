// Sub-pixel phases of a transposed convolution, all computed by one launch. Each phase is a stride-1 convolution with a
// subset of the taps, over windows shifted by a few pixels; its results are stored to y with the stride of the
// convolution.
#pragma once

struct Phase {               // filled by escalade/ops/conv2d_input_gradient/rungs/phases.py, in this order
    int taps_h, taps_w;      // of its filter
    int tap_h, tap_w;        // the first of them among those of the whole filter, which is their last: they run backwards
    int shift_h, shift_w;    // pixels from the windows of the launch to its own
    int offset_h, offset_w;  // of its first pixel in y
};

struct Phases {          // filled there too
    int step_h, step_w;  // from tap to tap of a class, among those of the whole filter
    Phase of[CLASSES];
};
