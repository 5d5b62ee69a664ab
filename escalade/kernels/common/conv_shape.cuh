// The sizes of a convolution, as every convolution kernel takes them.
#pragma once

struct ConvShape {  // filled by escalade/ops/conv2d/rungs/arguments.py, in this order
    int batch, channels, height, width;
    int filters, filter_height, filter_width;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int groups;
    int output_height, output_width;
};

// A second image, which a 1x1 filter without padding takes to the size of the output; no channels: there is none.
struct ShortcutShape {  // filled there too
    int channels, height, width, stride;
};
