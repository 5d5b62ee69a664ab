// Sizes of a pooling, and positions of outputs.
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int X_PITCH = 0;  // problem.x_pitch: elements from pixel to pixel in NHWC; 0 if dense
constexpr int Y_PITCH = 0;  // problem.y_pitch
#endif

struct PoolShape {
    int batch, channels, height, width;
    int output_height, output_width;

    // Elements between pixels in NHWC: X_PITCH and Y_PITCH are 0 for dense buffers.
    __device__ __forceinline__ int x_step() const { return X_PITCH ? X_PITCH : channels; }
    __device__ __forceinline__ int y_step() const { return Y_PITCH ? Y_PITCH : channels; }
};

struct PoolPosition {
    int image, channel, row, column;
};

// Position of element `at`, in memory order. 32-bit divisions are several times faster than 64-bit.
template <bool NHWC, class Index>
__device__ __forceinline__ PoolPosition position_among(Index at, int channels, int height, int width) {
    PoolPosition position;
    if (NHWC) position.channel = at % channels, at /= channels;
    position.column = at % width, at /= width;
    position.row = at % height, at /= height;
    if (!NHWC) position.channel = at % channels, at /= channels;
    position.image = at;
    return position;
}

// Position of output `at`, in memory order of y.
template <bool NHWC, class Index>
__device__ __forceinline__ PoolPosition pool_position(Index at, const PoolShape& shape) {
    return position_among<NHWC>(at, shape.channels, shape.output_height, shape.output_width);
}

// Offset of a position's plane in x.
template <bool NHWC>
__device__ __forceinline__ long long pool_plane(const PoolPosition& position, const PoolShape& shape) {
    const long long pixels = 1LL * shape.height * shape.width;
    return NHWC ? position.image * pixels * shape.x_step() + position.channel
                : (1LL * position.image * shape.channels + position.channel) * pixels;
}

// Offset of an output in y; `at` is the argument of `pool_position`.
template <bool NHWC, class Index>
__device__ __forceinline__ long long pool_output(const PoolPosition& position, Index at, const PoolShape& shape) {
    return NHWC ? at / shape.channels * 1LL * shape.y_step() + position.channel : at;
}
