// Windows of a pooling whose size is known at compile time.
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int KERNEL_H = 3;  // problem.kernel[0]
constexpr int KERNEL_W = 3;  // problem.kernel[1]
constexpr int STRIDE_H = 2;  // problem.stride[0]
constexpr int STRIDE_W = 2;  // problem.stride[1]
constexpr int PAD_H = 1;     // problem.padding[0]
constexpr int PAD_W = 1;     // problem.padding[1]
#endif
