// Receptive fields of output pixels: the gather of every implicit GEMM.
//
// A *window* belongs to an output pixel and is constant along k; a *tap* is a position along k and is the same for
// every window. So the element for (pixel, k) is at window.offset + tap.offset, and the bounds check is one comparison
// of two bit masks.
//
// The prelude of the including file defines FILTER_HEIGHT and FILTER_WIDTH; GROUPED, if the channels and filters of a
// shape are those of one group; and X_PITCH, if x is part of a larger buffer: elements between pixels.
#pragma once

#include "common/conv_shape.cuh"
#include "common/ptx.cuh"

constexpr bool TAPS_FIT_MASK = FILTER_HEIGHT <= 16 && FILTER_WIDTH <= 16;
constexpr int NOWHERE = -(1 << 30);  // a row that no tap brings back into the image

#ifndef X_PITCH
#define X_PITCH 0
#endif

#ifdef GROUPED
constexpr bool IN_GROUPS = true;
#else
constexpr bool IN_GROUPS = false;
#endif

// Channels between pixels; the shape's channels, or CHANNELS, are those of one group.
template <int CHANNELS = 0>
__device__ __forceinline__ int pixel_channels(const ConvShape& shape) {
    const int channels = CHANNELS ? CHANNELS : shape.channels;
    return X_PITCH ? X_PITCH : IN_GROUPS ? channels * shape.groups : channels;
}

struct Tap {
    int offset;       // from a window's first tap
    u32 bits;         // bit r and bit 16 + s
    int row, column;  // from a window's first tap, in pixels; used if the filter is too large for the bits

    // Tap (r, s), where adjacent pixels of a row are `pixel_step` apart.
    __device__ __forceinline__ static Tap at(int r, int s, int pixel_step, const ConvShape& shape) {
        const int row = r * shape.dilation_h, column = s * shape.dilation_w;
        return {(row * shape.width + column) * pixel_step, bits_of(r, s), row, column};
    }

    __device__ __forceinline__ static u32 bits_of(int r, int s) {
        return TAPS_FIT_MASK ? 1u << r % 32 | 0x10000u << s : 0;
    }
};

struct Window {
    int offset;       // of its first tap, from `first_image`
    u32 bits;         // filter rows (bit r) and columns (bit 16 + s) inside the image
    int row, column;  // of its first tap, in pixels

    __device__ __forceinline__ static Window of(int pixel, int first_image, int pixel_step, int image_step,
                                                const ConvShape& shape) {
        const int output_pixels = shape.output_height * shape.output_width;
        const int image = pixel / output_pixels;
        const int in_image = pixel - image * output_pixels;
        const int output_row = in_image / shape.output_width;
        const bool exists = image < shape.batch;
        Window window = {0, 0, NOWHERE, (in_image - output_row * shape.output_width) * shape.stride_w - shape.pad_w};
        if (exists) {
            window.row = output_row * shape.stride_h - shape.pad_h;
            window.offset = (image - first_image) * image_step;
            window.offset += (window.row * shape.width + window.column) * pixel_step;
        }
        if (TAPS_FIT_MASK) {
#pragma unroll
            for (int r = 0; r < FILTER_HEIGHT; ++r)
                window.bits |= (inside(window.row + r * shape.dilation_h, shape.height) ? 1u : 0u) << r % 16;
#pragma unroll
            for (int s = 0; s < FILTER_WIDTH; ++s)
                window.bits |= (inside(window.column + s * shape.dilation_w, shape.width) ? 0x10000u : 0u) << s % 16;
        }
        return window;
    }

    // Window of a 1x1 filter without padding over the shortcut: tap (0, 0) is inside if the pixel exists.
    __device__ __forceinline__ static Window of_shortcut(int pixel, int first_image, int pixel_step, int image_step,
                                                         const ConvShape& shape, const ShortcutShape& shortcut) {
        const int output_pixels = shape.output_height * shape.output_width;
        const int image = pixel / output_pixels;
        const int in_image = pixel - image * output_pixels;
        const int output_row = in_image / shape.output_width;
        const int output_column = in_image - output_row * shape.output_width;
        if (image >= shape.batch) return {0, 0, NOWHERE, 0};
        const int in_shortcut = (output_row * shortcut.width + output_column) * shortcut.stride;
        return {(image - first_image) * image_step + in_shortcut * pixel_step, Tap::bits_of(0, 0), 0, 0};
    }

    __device__ __forceinline__ bool sees(const Tap& tap, const ConvShape& shape) const {
        if (TAPS_FIT_MASK) return (bits & tap.bits) == tap.bits;
        return inside(row + tap.row, shape.height) && inside(column + tap.column, shape.width);
    }

private:
    __device__ __forceinline__ static bool inside(int position, int size) {
        return static_cast<unsigned>(position) < static_cast<unsigned>(size);
    }
};

// Iterator along k = (r, s, c), the order of NHWC, in steps of STEP. PARTIAL_CHANNELS is 0 if a step never crosses a
// tap, because the channels are a multiple of it; otherwise it is the number of channels. Offsets are in units of UNIT
// elements.
template <int PARTIAL_CHANNELS, int STEP, int UNIT>
struct TapWalk {
    int k, channel, r, s;
    Tap tap;

    __device__ __forceinline__ void move_to(int new_k, const ConvShape& shape) {
        const int channels = PARTIAL_CHANNELS ? PARTIAL_CHANNELS : shape.channels;
        const int number = new_k / channels;
        k = new_k;
        channel = new_k - number * channels;
        r = number / FILTER_WIDTH;
        s = number - r * FILTER_WIDTH;
        tap = Tap::at(r, s, pixel_channels<PARTIAL_CHANNELS>(shape) / UNIT, shape);
        tap.offset += channel / UNIT;
    }

    __device__ __forceinline__ void next(const ConvShape& shape) {
        if (PARTIAL_CHANNELS) {
            move_to(k + STEP, shape);
            return;
        }
        k += STEP;
        channel += STEP;
        tap.offset += STEP / UNIT;
        if (channel < shape.channels) return;
        const int pixel_units = pixel_channels(shape) / UNIT;
        channel = 0;
        tap.offset += (shape.dilation_w - 1) * pixel_units;
        if (IN_GROUPS || X_PITCH) tap.offset += pixel_units - shape.channels / UNIT;
        tap.column += shape.dilation_w;
        if (++s == FILTER_WIDTH) {
            s = 0, ++r;
            tap.offset += (shape.dilation_h * shape.width - FILTER_WIDTH * shape.dilation_w) * pixel_units;
            tap.row += shape.dilation_h, tap.column = 0;
        }
        tap.bits = Tap::bits_of(r, s);
    }
};
