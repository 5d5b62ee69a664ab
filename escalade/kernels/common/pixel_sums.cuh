// Sums over a CTA's pixels of IMAGES images in NHWC, for a slice of WIDTH channels: threads read VECTOR channels of
// different pixels, up to AHEAD in flight, and reduce their sums in smem. escalade/ops/shared/pixel_sums.py chooses
// LANES, GROUPS, SUMS, SHUFFLED and AHEAD.
#pragma once

#include "common/quantized_input.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;        // vector: channels per access
constexpr int IMAGES = 1;        // sums.images: images per CTA
constexpr int LANES = 4;         // sums.lanes: threads that read one pixel's slice together
constexpr int GROUPS = 32;       // sums.groups: threads that share the pixels of one pack and image
constexpr int SUMS = 4;          // sums.sums: partial sums per channel and image in shared memory
constexpr bool SHUFFLED = true;  // sums.shuffled: threads of a warp reduce by shuffles
constexpr int AHEAD = 2;         // sums.ahead: loads in flight per thread
#endif

constexpr int COLUMNS = WIDTH / VECTOR;  // packs of channels per slice
constexpr int FLOATS = VECTOR < 4 ? VECTOR : 4;

// A pack of channels, as words.
template <int BYTES>
struct Words { using Type = Pack<u32, BYTES / 4>; };
template <>
struct Words<2> { using Type = Pack<u16, 1>; };
template <class Stored>
using Loaded = typename Words<VECTOR * sizeof(Stored)>::Type;

// Allocates `count` elements of smem, rounded up to 16 bytes.
template <class T>
__device__ __forceinline__ T* take(unsigned char*& next, int count) {
    T* start = shared_part(reinterpret_cast<T*>(next), count);
    next += (count * sizeof(T) + 15) / 16 * 16;
    return start;
}

// The next AHEAD pixels of a thread, GROUPS apart, all in flight; past the last it repeats the last. A conditional load
// would be waited for before the next is issued.
template <class Stored>
__device__ __forceinline__ void load_pixels(Loaded<Stored> (&loaded)[AHEAD], const Stored* column, int pixel, int last,
                                            int x_pitch) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        loaded[i] = *reinterpret_cast<const Loaded<Stored>*>(column + min(pixel + i * GROUPS, last) * x_pitch);
}

// Adds the loaded pixels below `count`. The others are zeroed by words, which are fewer than elements.
template <class Stored>
__device__ __forceinline__ void add_pixels(float (&sums)[VECTOR], Loaded<Stored> (&loaded)[AHEAD], int pixel,
                                           int count) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        for (auto& word : loaded[i].at) word = pixel + i * GROUPS < count ? word : 0;
        add_pack(sums, reinterpret_cast<const Pack<Stored, VECTOR>&>(loaded[i]));
    }
}

// Sums over this CTA's pixels of its slice: sums_of_groups[IMAGES][SUMS][WIDTH]. LANES adjacent threads have the packs
// of a pixel. If they divide a warp, its threads reduce by shuffles, and there is one sum per warp. All threads call
// `meanwhile` once their first loads are in flight. `last` is the image's last pixel, relative to the CTA's first.
template <class Stored, class Meanwhile>
__device__ __forceinline__ void sum_slice(float* sums_of_groups, const Stored* x, int first_image, int batch,
                                          int columns, int pixels, int last, int x_pitch, Meanwhile meanwhile) {
    const int row = threadIdx.x / LANES, image = row / GROUPS, group = row % GROUPS;
    x += 1LL * min(first_image + image, batch - 1) * PIXELS * x_pitch;  // past the last image, repeats it
#pragma unroll 1
    for (int first = 0; first < COLUMNS; first += LANES) {  // uniform over the lanes of a warp
        const int column = first + threadIdx.x % LANES;
        const int count = image < IMAGES && column < columns ? pixels : 0;
        const Stored* here = x + min(column, columns - 1) * VECTOR;
        float sums[VECTOR] = {};
        Loaded<Stored> loaded[AHEAD];
        int pixel = group;
        load_pixels(loaded, here, pixel, last, x_pitch);
        if (first == 0) meanwhile();
        while (true) {
            add_pixels<Stored>(sums, loaded, pixel, count);
            pixel += GROUPS * AHEAD;
            if (pixel >= count) break;
            load_pixels(loaded, here, pixel, last, x_pitch);
        }
        if (SHUFFLED)
#pragma unroll
            for (int distance = LANES; distance < 32; distance *= 2)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) sums[e] += __shfl_xor_sync(ALL_LANES, sums[e], distance);
        const int sum = SHUFFLED ? group * LANES / 32 : group;
        if (image >= IMAGES || column >= COLUMNS || (SHUFFLED && threadIdx.x % 32 >= LANES)) continue;
        float* to = sums_of_groups + (image * SUMS + sum) * WIDTH + column * VECTOR;
#pragma unroll
        for (int e = 0; e < VECTOR; e += FLOATS) {
            Pack<float, FLOATS> some;
#pragma unroll
            for (int i = 0; i < FLOATS; ++i) some.at[i] = sums[e + i];
            store_pack(to + e, some);
        }
    }
}
