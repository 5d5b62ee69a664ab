// The sizes of a convolution, as every convolution kernel takes them.
#pragma once

struct ConvShape {  // filled by escalade/ops/conv2d/arguments.py, in this order
    int batch, channels, height, width;
    int filters, filter_height, filter_width;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int groups;
    int output_height, output_width;
};
