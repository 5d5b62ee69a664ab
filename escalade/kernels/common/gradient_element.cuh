// An element of a convolution's output gradient, by its index in memory order, and its window in x.
#pragma once

#include "common/conv_shape.cuh"

struct GradientElement {
    int image, filter;
    int first_channel;            // of the filter's group
    int first_row, first_column;  // of the window, which may begin outside the image

    __device__ __forceinline__ GradientElement(long long at, const ConvShape& shape) {
        const int pixels = shape.output_height * shape.output_width;
        const long long elements = 1LL * shape.filters * pixels;  // per image
        const int rest = static_cast<int>(at % elements);
        const int pixel = NHWC ? rest / shape.filters : rest % pixels;
        image = static_cast<int>(at / elements);
        filter = NHWC ? rest % shape.filters : rest / pixels;
        first_channel = filter / (shape.filters / shape.groups) * (shape.channels / shape.groups);
        first_row = pixel / shape.output_width * shape.stride_h - shape.pad_h;
        first_column = pixel % shape.output_width * shape.stride_w - shape.pad_w;
    }

    // Offset in the image of a tap and a channel of the group; -1 outside the image.
    __device__ __forceinline__ int input_offset(int tap, int channel, const ConvShape& shape) const {
        const int row = first_row + tap / shape.filter_width * shape.dilation_h;
        const int column = first_column + tap % shape.filter_width * shape.dilation_w;
        if (row < 0 || row >= shape.height || column < 0 || column >= shape.width) return -1;
        const int pixel = row * shape.width + column, at = first_channel + channel;
        return NHWC ? pixel * shape.channels + at : at * shape.height * shape.width + pixel;
    }
};
