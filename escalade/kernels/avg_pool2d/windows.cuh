// Windows of an average pooling, where they are not compile-time constants.
#pragma once

struct Windows {
    int kernel_h, kernel_w;  // problem.kernel
    int stride_h, stride_w;  // problem.stride
    int pad_h, pad_w;        // problem.padding
};
