// A share of an image's pixels in the registers of a CTA: PACKS of up to 16 bytes per thread, all loaded at once.
//
// group_norm.cuh defines the groups of a CTA.
#pragma once

#include "group_norm/group_norm.cuh"

struct Held {
    Values values[PACKS] = {};
    const int row = threadIdx.x / WIDTH, pack = threadIdx.x % WIDTH;
    const int mine;  // pixels of this thread, HEIGHT apart

    // `from` is the share's first pixel, at the CTA's first channel.
    __device__ __forceinline__ Held(const Element* from, int pixels, int pitch)
        : mine(row < HEIGHT && row < pixels ? (pixels - row + HEIGHT - 1) / HEIGHT : 0) {
        from += 1LL * row * pitch + pack * VECTOR;
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
            if (i < mine) values[i] = load_pack<Element, VECTOR>(from + 1LL * i * HEIGHT * pitch);
    }

    // Mean and squared deviations of this thread's elements.
    __device__ __forceinline__ void measure(Part (&parts)[UNITS]) const {
        const float share = mine ? 1.f / (mine * UNIT) : 0.f;
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            float sum = 0.f, squares = 0.f;
#pragma unroll
            for (int i = 0; i < PACKS; ++i)
#pragma unroll
                for (int e = unit * UNIT; e < (unit + 1) * UNIT; ++e) sum += to_float(values[i].at[e]);
            const float mean = sum * share;
#pragma unroll
            for (int i = 0; i < PACKS; ++i)
#pragma unroll
                for (int e = unit * UNIT; e < (unit + 1) * UNIT; ++e) {
                    const float distance = to_float(values[i].at[e]) - mean;
                    if (i < mine) squares += distance * distance;
                }
            parts[unit] = {mean, squares};
        }
    }

    // `to` is the start of the share's results; its first pixel is `first` of the image.
    template <bool STREAMING = false>
    __device__ __forceinline__ void store(Result* to, int pitch, const Channels& channels, const Planes& planes,
                                          int first) const {
        to += 1LL * row * pitch + pack * VECTOR;
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
            if (i < mine) {
                const Results results = channels.normalized(values[i], planes, first + row + i * HEIGHT);
                if constexpr (STREAMING) {
                    store_pack_streaming(to + 1LL * i * HEIGHT * pitch, results);
                } else {
                    store_pack(to + 1LL * i * HEIGHT * pitch, results);
                }
            }
    }
};
