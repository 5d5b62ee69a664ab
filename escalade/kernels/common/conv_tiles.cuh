// Operands of an implicit GEMM in NHWC, copied by k-tile into smem with cp.async.
//
//   y[pixel][filter] = sum over k of input[pixel][k] * weight[filter][k],   k = (r * S + s) * C + c
//
// `weight` is stored in that order. `input` is never stored: its row `pixel` is gathered from x, tap by tap. With
// SHORTCUT, k continues, from the next k-tile on, over the channels of a second image with the weights of a 1x1 filter.
//
// The prelude of the including file defines Element, FILTER_HEIGHT, FILTER_WIDTH, COPY_BYTES (8 or 16, the size of one
// cp.async; the channels are a multiple of it), PARTIAL_CHANNELS (see TapWalk), SHORTCUT, and SHORTCUT_PARTIAL (its
// channels are not a multiple of TILE_K).
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                    // operands.element
constexpr int FILTER_HEIGHT = 3;          // problem.filter_height
constexpr int FILTER_WIDTH = 3;           // problem.filter_width
constexpr int COPY_BYTES = 16;            // operands.copy_bytes
constexpr int PARTIAL_CHANNELS = 0;       // operands.partial_channels(config): 0 if all k-tiles are full
constexpr bool SHORTCUT = false;          // problem.shortcut_channels > 0
constexpr bool SHORTCUT_PARTIAL = false;  // operands.partial_shortcut(config)
constexpr int TILE_M = 32;                // config.tile_m: output pixels per CTA
constexpr int TILE_N = 32;                // config.tile_n: filters per CTA
constexpr int TILE_K = 16;                // operands.tile_k(config)
#endif

#include "common/conv_windows.cuh"
#include "common/mma_tile.cuh"

constexpr int COPY_ELEMENTS = COPY_BYTES / sizeof(Element);
struct alignas(COPY_BYTES) Chunk {  // one cp.async; offsets into the images are in chunks
    Element at[COPY_ELEMENTS];
};

__device__ __forceinline__ void copy_async(u32 shared, const void* global, bool inside) {
    if (COPY_BYTES == 16)
        copy_async_16(shared, global, inside);
    else
        copy_async_8(shared, global, inside);
}

struct Shortcut {
    const Element* x;
    const Element* weight;
    ShortcutShape shape;
};

// Copies k-tiles of TILE_M windows and TILE_N filters, TILE_K deep, for a CTA of THREADS threads. Adjacent threads copy
// adjacent chunks of a row; a thread's chunk index is the same in all its rows.
template <int TILE_M, int TILE_N, int TILE_K, int THREADS>
struct TileCopier {
    static constexpr int ROW_BYTES = TILE_K * sizeof(Element);
    static constexpr int COPIES_IN_ROW = ROW_BYTES / COPY_BYTES;
    static constexpr int ROWS_AT_ONCE = THREADS / COPIES_IN_ROW;
    static constexpr int ROWS_A = TILE_M / ROWS_AT_ONCE;
    static constexpr int ROWS_B = TILE_N / ROWS_AT_ONCE;
    static constexpr int BYTES_A = TILE_M * ROW_BYTES;
    static constexpr int BYTES_B = TILE_N * ROW_BYTES;
    static constexpr int STAGE_BYTES = BYTES_A + BYTES_B;
    static_assert(THREADS % COPIES_IN_ROW == 0 && TILE_M % ROWS_AT_ONCE == 0 && TILE_N % ROWS_AT_ONCE == 0,
                  "every thread copies the same number of chunks");
    static_assert(ROWS_AT_ONCE % 8 == 0, "the swizzle is the same in all rows of a thread");

    static constexpr bool DEPTH_CHECKED = PARTIAL_CHANNELS || (SHORTCUT && SHORTCUT_PARTIAL);

    const ConvShape& shape;
    const Chunk* images;     // first image that the tile reads
    const Element* weights;  // this thread's chunk of its first filter
    long long filter_step;   // elements between its filters
    int filters_left;        // from its first filter on
    int depth;               // length of k
    u32 target;              // this thread's first chunk, relative to the stage
    TapWalk<PARTIAL_CHANNELS, TILE_K, COPY_ELEMENTS> walk;
    Window windows[ROWS_A];
    // With SHORTCUT only.
    Shortcut shortcut;
    int first_pixel, first_filter;
    int taps_left;  // k-tiles before the shortcut's

    __device__ __forceinline__ TileCopier(const ConvShape& shape, const Element* x, const Element* weight,
                                          int first_pixel, int first_filter, int first_k, const Shortcut& shortcut = {})
        : shape(shape), shortcut(shortcut), first_pixel(first_pixel), first_filter(first_filter) {
        const int row = threadIdx.x / COPIES_IN_ROW;
        const int chunk = threadIdx.x % COPIES_IN_ROW;
        const int k = first_k + chunk * COPY_ELEMENTS;
        const int first_image = first_pixel / (shape.output_height * shape.output_width);
        const int pixel_chunks = pixel_channels(shape) / COPY_ELEMENTS;
        const int image_chunks = shape.height * shape.width * pixel_chunks;
        // In elements: in chunks, the compiler would add image and offset again for every copy.
        images = reinterpret_cast<const Chunk*>(x + 1LL * first_image * image_chunks * COPY_ELEMENTS);
        depth = FILTER_HEIGHT * FILTER_WIDTH * shape.channels;
        weights = weight + 1LL * (first_filter + row) * depth + k;
        filter_step = 1LL * ROWS_AT_ONCE * depth;
        filters_left = shape.filters - first_filter - row;
        target = swizzled<ROW_BYTES>(row, chunk * COPY_BYTES);
        // If k-tiles never cross a tap, the tap is uniform over the CTA and the chunk is part of the windows' offsets.
        walk.move_to(PARTIAL_CHANNELS ? k : first_k, shape);
#pragma unroll
        for (int i = 0; i < ROWS_A; ++i) {
            const int pixel = first_pixel + row + i * ROWS_AT_ONCE;
            windows[i] = Window::of(pixel, first_image, pixel_chunks, image_chunks, shape);
            if (!PARTIAL_CHANNELS) windows[i].offset += chunk;
        }
        if (SHORTCUT) {
            taps_left = (depth + TILE_K - 1) / TILE_K - first_k / TILE_K;
            if (taps_left <= 0) enter_shortcut(-taps_left);
        }
    }

    // Without `wanted`, writes zeros: cheaper than a branch inside the mainloop.
    __device__ __forceinline__ void copy_a(u32 stage, bool wanted) const {
        const bool exists = wanted && (!DEPTH_CHECKED || walk.k < depth);
#pragma unroll
        for (int i = 0; i < ROWS_A; ++i)
            copy_async(stage + target + i * ROWS_AT_ONCE * ROW_BYTES, images + (windows[i].offset + walk.tap.offset),
                       exists && windows[i].sees(walk.tap, shape));
    }

    __device__ __forceinline__ void copy_b(u32 stage, bool wanted) const {
        const bool exists = wanted && (!DEPTH_CHECKED || walk.k < depth);
#pragma unroll
        for (int i = 0; i < ROWS_B; ++i)
            copy_async(stage + BYTES_A + target + i * ROWS_AT_ONCE * ROW_BYTES, weights + i * filter_step,
                       exists && i * ROWS_AT_ONCE < filters_left);
    }

    __device__ __forceinline__ void next() {
        weights += TILE_K;
        if (SHORTCUT && taps_left <= 0) {
            walk.k += TILE_K;
            walk.tap.offset += TILE_K / COPY_ELEMENTS;
            return;
        }
        walk.next(shape);
        if (SHORTCUT && --taps_left == 0) enter_shortcut(0);
    }

private:
    // Continues at k-tile `tile` of the shortcut: 1-tap windows, k is the channel of this thread's chunk.
    __device__ __forceinline__ void enter_shortcut(int tile) {
        const int row = threadIdx.x / COPIES_IN_ROW;
        const int chunk = threadIdx.x % COPIES_IN_ROW;
        const int first_image = first_pixel / (shape.output_height * shape.output_width);
        const int pixel_chunks = shortcut.shape.channels / COPY_ELEMENTS;
        const int image_chunks = shortcut.shape.height * shortcut.shape.width * pixel_chunks;
        images = reinterpret_cast<const Chunk*>(shortcut.x + 1LL * first_image * image_chunks * COPY_ELEMENTS);
        depth = shortcut.shape.channels;
        walk.k = tile * TILE_K + chunk * COPY_ELEMENTS;
        walk.tap = Tap::at(0, 0, 0, shape);
        walk.tap.offset = walk.k / COPY_ELEMENTS;
        weights = shortcut.weight + 1LL * (first_filter + row) * depth + walk.k;
        filter_step = 1LL * ROWS_AT_ONCE * depth;
#pragma unroll
        for (int i = 0; i < ROWS_A; ++i)
            windows[i] = Window::of_shortcut(first_pixel + row + i * ROWS_AT_ONCE, first_image, pixel_chunks,
                                             image_chunks, shape, shortcut.shape);
    }
};
