// Sizes of a convolution, as every convolution kernel takes them.
#pragma once

struct ConvShape {
    int batch;     // problem.output_images: of volumes, all images of y
    int channels;  // channels: all, or those of a group
    int height, width;
    int filters;  // filters: all, or those of a group
    int filter_height;  // problem.weight_rows: of volumes, the rows of all frames
    int filter_width;
    int stride_h, stride_w;      // problem.stride
    int pad_h, pad_w;            // problem.padding
    int dilation_h, dilation_w;  // problem.dilation
    int groups;
    int output_height, output_width;
};

// A second image, which a 1x1 filter without padding maps to the size of the output. 0 channels: none.
struct ShortcutShape {
    int channels;       // problem.shortcut_channels
    int height, width;  // problem.shortcut_size
    int stride;         // problem.shortcut_stride
};
