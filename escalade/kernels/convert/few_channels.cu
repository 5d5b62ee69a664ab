// y[n][c][pixel] = x[n][c][pixel] * scale[c] + shift[c], 0 for c >= CHANNELS; x and y each in NCHW or NHWC
//
// For images: a thread takes PIXELS adjacent pixels with all their channels, so that it holds whole runs of every plane
// of an NCHW tensor and one run of an NHWC tensor, and moves both in accesses of up to 16 bytes, ROUNDS times, all
// loads before all stores. No element is touched twice, and no smem is used. Limiter: memory.
//
// Rung: `few_channels`. Read convert.cuh (element types, normalization).
#include "convert/convert.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int CHANNELS = 3;         // problem.channels
constexpr int STORED_CHANNELS = 3;  // problem.stored_channels
constexpr int PADDED_CHANNELS = 4;  // problem.padded_channels
constexpr int PIXELS = 4;           // config.pixels: pixels per thread and round
constexpr int ROUNDS = 1;           // config.rounds
constexpr int SOURCE_VECTOR = 4;    // source_vector: elements per load
constexpr int TARGET_VECTOR = 4;    // target_vector: elements per store
#endif

// COUNT consecutive elements, of which the first `exist` are valid; VECTOR divides both numbers.
template <int VECTOR, int COUNT, class T>
__device__ __forceinline__ void read_run(T (&run)[COUNT], const T* address, int exist) {
#pragma unroll
    for (int first = 0; first < COUNT; first += VECTOR) {
        Pack<T, VECTOR> pack = {};
        if (first < exist) pack = load_pack<T, VECTOR>(address + first);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) run[first + e] = pack.at[e];
    }
}

template <int VECTOR, int COUNT, class T>
__device__ __forceinline__ void write_run(T* address, const T (&run)[COUNT], int exist) {
#pragma unroll
    for (int first = 0; first < COUNT; first += VECTOR) {
        Pack<T, VECTOR> pack;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) pack.at[e] = run[first + e];
        if (first < exist) store_pack(address + first, pack);
    }
}

using Read = Source[CHANNELS][PIXELS];

// The run of pixels from `first` on, of which `exist` are valid.
__device__ __forceinline__ void read_pixels(Read& read, const Source* x, u32 image, int first, int exist, int pixels) {
    if (SOURCE_NHWC) {
        Source run[PIXELS * STORED_CHANNELS];
        read_run<SOURCE_VECTOR>(run, x + (1LL * image * pixels + first) * STORED_CHANNELS, exist * STORED_CHANNELS);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
            for (int p = 0; p < PIXELS; ++p) read[c][p] = run[p * STORED_CHANNELS + c];
    } else {
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
            read_run<SOURCE_VECTOR>(read[c], x + (1LL * image * STORED_CHANNELS + c) * pixels + first, exist);
    }
}

__device__ __forceinline__ void write_pixels(Target* y, const Read& read, const float* scale, const float* shift,
                                             u32 image, int first, int exist, int pixels) {
    Target results[PADDED_CHANNELS][PIXELS];
#pragma unroll
    for (int c = 0; c < PADDED_CHANNELS; ++c)
#pragma unroll
        for (int p = 0; p < PIXELS; ++p)
            results[c][p] = from_float<Target>(
                c < CHANNELS ? normalized(to_float(read[min(c, CHANNELS - 1)][p]), scale, shift, c) : 0.f);

    if (TARGET_NHWC) {
        Target run[PIXELS * PADDED_CHANNELS];
#pragma unroll
        for (int c = 0; c < PADDED_CHANNELS; ++c)
#pragma unroll
            for (int p = 0; p < PIXELS; ++p) run[p * PADDED_CHANNELS + c] = results[c][p];
        write_run<TARGET_VECTOR>(y + (1LL * image * pixels + first) * PADDED_CHANNELS, run, exist * PADDED_CHANNELS);
    } else {
#pragma unroll
        for (int c = 0; c < PADDED_CHANNELS; ++c)
            write_run<TARGET_VECTOR>(y + (1LL * image * PADDED_CHANNELS + c) * pixels + first, results[c], exist);
    }
}

extern "C" __global__ void convert_few_channels(const Source* x, const float* scale, const float* shift, Target* y,
                                                int batch, int pixels) {
    wait_for_previous_launch();
    const u32 runs = (pixels + PIXELS - 1) / PIXELS;  // per image
    const u32 at = blockIdx.x * ROUNDS * blockDim.x + threadIdx.x;
    Read read[ROUNDS];
    u32 image[ROUNDS];
    int first[ROUNDS], exist[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const u32 run = at + round * blockDim.x;
        image[round] = run / runs;
        first[round] = (run - image[round] * runs) * PIXELS;
        exist[round] = image[round] < static_cast<u32>(batch) ? min(PIXELS, pixels - first[round]) : 0;
        read_pixels(read[round], x, image[round], first[round], exist[round], pixels);
    }
    float scales[CHANNELS], shifts[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        scales[c] = NORMALISE ? scale[c] : 1.f;
        shifts[c] = NORMALISE ? shift[c] : 0.f;
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round)
        write_pixels(y, read[round], scales, shifts, image[round], first[round], exist[round], pixels);
}
