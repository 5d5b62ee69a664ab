// Windows of a max pooling, where they are not compile-time constants.
#pragma once

struct Windows {  // filled by escalade/ops/max_pool2d/rungs/naive.py, in this order
    int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};
