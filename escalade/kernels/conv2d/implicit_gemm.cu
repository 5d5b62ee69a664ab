// y[pixel][filter] = relu(sum over k of x[window of pixel at k] * weight[filter][k] + bias[filter] + residual)
//
// The three steps of im2col in one kernel, fp32 on CUDA cores: a CTA gathers the unrolled matrix tile by tile directly
// into smem, and each thread accumulates THREAD_M x THREAD_N outputs in registers. cp.async runs STAGES - 1 k-tiles
// ahead, 4 bytes at a time, because both tiles are transposed on the way: k is the slow index in smem, so that a thread
// reads its rows and columns 16 bytes at a time.
//   NCHW  k = (c, r, s), adjacent threads gather adjacent pixels
//   NHWC  k = (r, s, c), they gather adjacent channels; `weight` is [filter][k] in either layout
// Limiter: FFMA throughput. A thread reads THREAD_M + THREAD_N floats of smem per THREAD_M * THREAD_N multiply-adds.
//
// Rung: `implicit_gemm`. conv2d_input_gradient launches it as a convolution of the gradient.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool NHWC = false;            // problem.layout == "nhwc"
constexpr int FILTER_HEIGHT = 3;        // problem.filter_height
constexpr int FILTER_WIDTH = 3;         // problem.filter_width
constexpr int PARTIAL_CHANNELS = 0;     // problem.channels if nhwc and problem.channels % config.tile_k else 0
constexpr bool OUTPUT_ALIGNED = false;  // output_aligned: whole vectors of 4 results
constexpr int TILE_M = 32;              // config.tile_m: output pixels per CTA
constexpr int TILE_N = 32;              // config.tile_n: filters per CTA
constexpr int TILE_K = 16;              // config.tile_k
constexpr int THREAD_M = 4;             // config.thread_m
constexpr int THREAD_N = 4;             // config.thread_n
constexpr int STAGES = 4;               // config.stages: stages of the copy pipeline
constexpr int BLOCKS_PER_SM = 8;        // config.blocks_per_sm: target occupancy, which limits registers per thread
constexpr bool HAS_BIAS = false;        // problem.bias
constexpr bool HAS_RESIDUAL = false;    // problem.residual
constexpr bool HAS_RELU = false;        // problem.relu
#endif

#include "common/conv_windows.cuh"
#include "common/epilogue.cuh"
#include "common/ptx.cuh"

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int THREADS_M = TILE_M / THREAD_M;
constexpr int THREADS_N = TILE_N / THREAD_N;
constexpr int THREADS = THREADS_M * THREADS_N;
constexpr int WARPS_M = THREADS_M / 8;
// Four floats of padding: the eight k rows by four columns that a warp writes at once cover all banks.
constexpr int PITCH_M = TILE_M + 4;
constexpr int PITCH_N = TILE_N + 4;
constexpr int ROWS_AT_ONCE = THREADS / TILE_K;  // pixels (NHWC) or filters that the CTA copies at once

using Four = Pack<float, 4>;
using InputTile = float[TILE_K][PITCH_M];
using WeightTile = float[TILE_K][PITCH_N];

// Copies x in NHWC: a thread has one k per k-tile, and every ROWS_AT_ONCE-th pixel.
struct ChannelsLastInput {
    static constexpr int PIXELS = TILE_M / ROWS_AT_ONCE;

    const float* images;
    TapWalk<PARTIAL_CHANNELS, TILE_K, 1> walk;
    Window windows[PIXELS];

    __device__ __forceinline__ ChannelsLastInput(const float* x, int first_pixel, const Tap*, const ConvShape& shape) {
        const int first_image = first_pixel / (shape.output_height * shape.output_width);
        const int image_elements = shape.channels * shape.height * shape.width;
        const int line = threadIdx.x % TILE_K;
        images = x + 1LL * first_image * image_elements;
        walk.move_to(PARTIAL_CHANNELS ? line : 0, shape);
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            windows[i] = Window::of(first_pixel + threadIdx.x / TILE_K + i * ROWS_AT_ONCE, first_image, shape.channels,
                                    image_elements, shape);
            if (!PARTIAL_CHANNELS) windows[i].offset += line;
        }
    }

    __device__ __forceinline__ void copy_next(InputTile& tile, bool wanted, const ConvShape& shape) {
        const bool exists = wanted && (!PARTIAL_CHANNELS || walk.k < TAPS * shape.channels);
        const u32 target = shared_address(&tile[threadIdx.x % TILE_K][threadIdx.x / TILE_K]);
#pragma unroll
        for (int i = 0; i < PIXELS; ++i)
            copy_async_4(target + i * ROWS_AT_ONCE * 4, images + (windows[i].offset + walk.tap.offset),
                         exists && windows[i].sees(walk.tap, shape));
        walk.next(shape);
    }
};

// Copies x in NCHW: a thread has one pixel, and every LINES_AT_ONCE-th k of each k-tile.
struct ChannelsFirstInput {
    static constexpr int LINES_AT_ONCE = THREADS / TILE_M;
    static constexpr int LINES = TILE_K / LINES_AT_ONCE;

    const float* images;
    const Tap* taps;
    Window window;
    int k;

    __device__ __forceinline__ ChannelsFirstInput(const float* x, int first_pixel, const Tap* taps,
                                                  const ConvShape& shape)
        : taps(taps), k(threadIdx.x / TILE_M) {
        const int first_image = first_pixel / (shape.output_height * shape.output_width);
        const int image_elements = shape.channels * shape.height * shape.width;
        images = x + 1LL * first_image * image_elements;
        window = Window::of(first_pixel + threadIdx.x % TILE_M, first_image, 1, image_elements, shape);
    }

    __device__ __forceinline__ void copy_next(InputTile& tile, bool wanted, const ConvShape& shape) {
        const int depth = wanted ? TAPS * shape.channels : 0;
        const u32 target = shared_address(&tile[threadIdx.x / TILE_M][threadIdx.x % TILE_M]);
#pragma unroll
        for (int i = 0; i < LINES; ++i) {
            const int line = k + i * LINES_AT_ONCE;
            const int channel = line / TAPS;
            const Tap tap = taps[line - channel * TAPS];
            const int offset = window.offset + channel * shape.height * shape.width + tap.offset;
            copy_async_4(target + i * LINES_AT_ONCE * PITCH_M * 4, images + offset,
                         line < depth && window.sees(tap, shape));
        }
        k += TILE_K;
    }
};

// Copies the weights: a thread has one k per k-tile, and every ROWS_AT_ONCE-th filter.
struct Weights {
    static constexpr int FILTERS = TILE_N / ROWS_AT_ONCE;

    const float* weights;
    long long filter_step;
    int filters_left, k;

    __device__ __forceinline__ Weights(const float* weight, int first_filter, const ConvShape& shape)
        : k(threadIdx.x % TILE_K) {
        const int depth = TAPS * shape.channels;
        const int filter = first_filter + threadIdx.x / TILE_K;
        weights = weight + 1LL * filter * depth + k;
        filter_step = 1LL * ROWS_AT_ONCE * depth;
        filters_left = shape.filters - filter;
    }

    __device__ __forceinline__ void copy_next(WeightTile& tile, bool wanted, const ConvShape& shape) {
        const bool exists = wanted && k < TAPS * shape.channels;
        const u32 target = shared_address(&tile[threadIdx.x % TILE_K][threadIdx.x / TILE_K]);
#pragma unroll
        for (int i = 0; i < FILTERS; ++i)
            copy_async_4(target + i * ROWS_AT_ONCE * 4, weights + i * filter_step,
                         exists && i * ROWS_AT_ONCE < filters_left);
        weights += TILE_K;
        k += TILE_K;
    }
};

// A thread's outputs are 4x4 blocks, spread over the tile so that a warp reads whole lines of smem.
using Accumulators = float[THREAD_M / 4][THREAD_N / 4][4][4];

__device__ __forceinline__ void multiply(Accumulators& acc, const InputTile& input, const WeightTile& weights,
                                         int thread_m, int thread_n) {
#pragma unroll
    for (int k = 0; k < TILE_K; ++k) {
        Four a[THREAD_M / 4], b[THREAD_N / 4];
#pragma unroll
        for (int i = 0; i < THREAD_M / 4; ++i) a[i] = load_pack<float, 4>(&input[k][(i * THREADS_M + thread_m) * 4]);
#pragma unroll
        for (int j = 0; j < THREAD_N / 4; ++j) b[j] = load_pack<float, 4>(&weights[k][(j * THREADS_N + thread_n) * 4]);
#pragma unroll
        for (int i = 0; i < THREAD_M / 4; ++i)
#pragma unroll
            for (int j = 0; j < THREAD_N / 4; ++j)
#pragma unroll
                for (int e = 0; e < 16; ++e) acc[i][j][e / 4][e % 4] += a[i].at[e / 4] * b[j].at[e % 4];
    }
}

// Stores a 4x4 block in NHWC: four filters of a pixel at once.
__device__ __forceinline__ void finish_channels_last(const float (&acc)[4][4], int pixel, int filter, const float* bias,
                                                     const float* residual, float* y, const ConvShape& shape) {
    const int pixels = shape.batch * shape.output_height * shape.output_width;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        if (pixel + m >= pixels) continue;
        const long long at = 1LL * (pixel + m) * shape.filters + filter;
        if (OUTPUT_ALIGNED) {
            if (filter >= shape.filters) continue;
            const Four old = HAS_RESIDUAL ? load_pack<float, 4>(residual + at) : Four{};
            Four results;
#pragma unroll
            for (int n = 0; n < 4; ++n)
                results.at[n] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(acc[m][n], bias, filter + n, old.at, n);
            store_pack(y + at, results);
        } else {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if (filter + n >= shape.filters) continue;
                y[at + n] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(acc[m][n], bias, filter + n, residual, at + n);
            }
        }
    }
}

// Stores a 4x4 block in NCHW: four pixels of a filter at once if they always share an image.
__device__ __forceinline__ void finish_channels_first(const float (&acc)[4][4], int pixel, int filter,
                                                      const float* bias, const float* residual, float* y,
                                                      const ConvShape& shape) {
    const int output_pixels = shape.output_height * shape.output_width;
#pragma unroll
    for (int m = 0; m < 4; m += OUTPUT_ALIGNED ? 4 : 1) {
        const int image = (pixel + m) / output_pixels;
        if (image >= shape.batch) continue;
        const long long first_at = 1LL * image * shape.filters * output_pixels + (pixel + m - image * output_pixels);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (filter + n >= shape.filters) continue;
            const long long at = first_at + 1LL * (filter + n) * output_pixels;
            if (OUTPUT_ALIGNED) {
                const Four old = HAS_RESIDUAL ? load_pack<float, 4>(residual + at) : Four{};
                Four results;
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    results.at[e] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(acc[e][n], bias, filter + n, old.at, e);
                store_pack(y + at, results);
            } else {
                y[at] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(acc[m][n], bias, filter + n, residual, at);
            }
        }
    }
}

template <bool LAST, class ChannelsLast, class ChannelsFirst>
struct Either {
    using type = ChannelsLast;
};
template <class ChannelsLast, class ChannelsFirst>
struct Either<false, ChannelsLast, ChannelsFirst> {
    using type = ChannelsFirst;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_implicit_gemm(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
                         const float* __restrict__ residual, float* __restrict__ y, ConvShape shape) {
    wait_for_previous_launch();
    __shared__ __align__(16) InputTile input_tiles[STAGES];
    __shared__ __align__(16) WeightTile weight_tiles[STAGES];
    __shared__ __align__(16) Tap taps[NHWC ? 1 : TAPS];

    // CTAs over the same pixels are adjacent, so x is read from DRAM once.
    const int tiles_n = (shape.filters + TILE_N - 1) / TILE_N;
    const int first_pixel = blockIdx.x / tiles_n * TILE_M;
    const int first_filter = blockIdx.x % tiles_n * TILE_N;

    if (!NHWC) {
        for (int tap = threadIdx.x; tap < TAPS; tap += THREADS)
            taps[tap] = Tap::at(tap / FILTER_WIDTH, tap % FILTER_WIDTH, 1, shape);
        __syncthreads();
    }

    // A warp is 8 x 4 threads, every eight adjacent ones 4 x 2: no phase of a smem read has a bank conflict.
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int thread_m = warp % WARPS_M * 8 + lane % 4 + lane / 8 % 2 * 4;
    const int thread_n = warp / WARPS_M * 4 + lane / 4 % 2 + lane / 16 * 2;

    Either<NHWC, ChannelsLastInput, ChannelsFirstInput>::type input(x, first_pixel, taps, shape);
    Weights weights(weight, first_filter, shape);
    const int tiles = (TAPS * shape.channels + TILE_K - 1) / TILE_K;
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) {
        input.copy_next(input_tiles[tile], tile < tiles, shape);
        weights.copy_next(weight_tiles[tile], tile < tiles, shape);
        copy_async_commit();
    }

    Accumulators acc = {};
    int read_stage = 0, write_stage = STAGES - 1;
    for (int tile = 0; tile < tiles; ++tile) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();  // this k-tile has arrived for all, and all are done with the stage that is overwritten
        input.copy_next(input_tiles[write_stage], tile + STAGES - 1 < tiles, shape);
        weights.copy_next(weight_tiles[write_stage], tile + STAGES - 1 < tiles, shape);
        copy_async_commit();
        multiply(acc, input_tiles[read_stage], weight_tiles[read_stage], thread_m, thread_n);
        write_stage = read_stage;
        read_stage = read_stage == STAGES - 1 ? 0 : read_stage + 1;
    }
    copy_async_wait<0>();

#pragma unroll
    for (int i = 0; i < THREAD_M / 4; ++i)
#pragma unroll
        for (int j = 0; j < THREAD_N / 4; ++j) {
            const int pixel = first_pixel + (i * THREADS_M + thread_m) * 4;
            const int filter = first_filter + (j * THREADS_N + thread_n) * 4;
            if (NHWC) finish_channels_last(acc[i][j], pixel, filter, bias, residual, y, shape);
            else finish_channels_first(acc[i][j], pixel, filter, bias, residual, y, shape);
        }
}
