// parts[part][k][r][s][c] = sum over the part's pixels p of gradient[p][k] * x[window(p, r, s)][c]; for the bias, of
// gradient[p][k] alone
//
// 3x3 filters on Hopper, NHWC: one CTA per 64 filters x 64 channels x 9 taps, so what it loads of x serves all taps. An
// MMA covers 16 images at one pixel: images are adjacent in smem, so the next pixel is 2048 bytes further. A strip of
// ROWS output rows (a divisor of all) is walked column by column: a stage has one column of gradients and the STRIDE
// columns of x that come with it. Warpgroup s multiplies the taps of column s; the 3 filter rows are adjacent pixels,
// which one wgmma takes as 3 x 64 of its columns. Accumulators are stored as fp32 parts, reduced by a second launch in
// a fixed order. In CTAs of the first channels, a warp of the producer warpgroup sums the gradients for the bias.
// Limiter: tensor cores; loads from L2 amount to 16 to 28 bytes per cycle with stride 1, to 40 with stride 2.
//
// Rungs: `window`; `window_split` with halves of fp32. Read sm90_tile.cuh (shared with the other Hopper kernels here).
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = __half;          // problem.dtype
constexpr bool HAS_BIAS = true;  // problem.bias
constexpr bool BF16 = false;     // forward.dtype == "bf16"
constexpr int ROWS = 5;          // config.rows: output rows per strip
constexpr int STRIDE = 1;        // stride
constexpr int STAGES = 9;        // config.stages
#endif

#include "conv2d_weight_gradient/sm90_tile.cuh"

constexpr int TAPS = 3;  // along each side
constexpr int IMAGES = STEP_PIXELS;
constexpr int X_ROWS = (ROWS - 1) * STRIDE + TAPS;
constexpr int X_COLUMN_BYTES = X_ROWS * STEP_BYTES;
constexpr int X_BYTES = STRIDE * X_COLUMN_BYTES;
constexpr int GRADIENT_BYTES = ROWS * STEP_BYTES;
constexpr int STAGE_BYTES = X_BYTES + GRADIENT_BYTES;
constexpr int AHEAD = (TAPS - 1) / STRIDE;  // stages past a column's own that its window reaches into
constexpr int WARPGROUPS = TAPS;
constexpr int THREADS = (WARPGROUPS + 1) * 128;
static_assert(STRIDE == 1 || STRIDE == 2, "stride 1 or 2");
static_assert(STAGES > AHEAD + 1, "a window and the previous stage, released last");

using Accumulators = float[TAPS * BOX / 2];
using Stages = Ring<STAGES, STAGE_BYTES>;  // columns of x, then one of gradients

// Adjacent columns of one strip.
struct Run {
    int image, row, column;  // of the first output pixel
    int length;
};

// Columns of a part, numbered over all strips of all groups of images, run by run.
struct Walk {
    int at, end;

    __device__ __forceinline__ Walk(const ConvShape& shape, int part_columns) {
        const int all = (shape.batch + IMAGES - 1) / IMAGES * (shape.output_height / ROWS) * shape.output_width;
        at = blockIdx.y * part_columns;
        end = min(all, at + part_columns);
    }

    __device__ __forceinline__ bool next(Run& run, const ConvShape& shape) {
        if (at >= end) return false;
        const int strip = at / shape.output_width, strips = shape.output_height / ROWS;
        run.image = strip / strips * IMAGES;
        run.row = strip % strips * ROWS;
        run.column = at % shape.output_width;
        run.length = min(shape.output_width - run.column, end - at);
        at += run.length;
        return true;
    }
};

// Issues the copies by column. Called by one thread.
__device__ __forceinline__ void load_columns(const TensorMap& gradient_map, const TensorMap& x_map, Stages ring,
                                             const ConvShape& shape, Walk walk, int first_filter, int first_channel) {
    for (Run run; walk.next(run, shape);)
        for (int j = 0; j < run.length + AHEAD; ++j) {
            const u32 full = ring.full(ring.stage);
            ring.wait_empty();
            barrier_expect(full, j < run.length ? STAGE_BYTES : X_BYTES);
            tma_load_4d(ring.address(), x_map, full, first_channel, run.image, run.row * STRIDE - shape.pad_h,
                        (run.column + j) * STRIDE - shape.pad_w);
            if (j < run.length)
                tma_load_4d(ring.address() + X_BYTES, gradient_map, full, first_filter, run.image, run.row,
                            run.column + j);
            ring.next();
        }
}

// A stage is released once the MMAs of the next column are issued, so the tensor cores never run dry. Every stage is
// waited for before it is released; otherwise the release would count for its previous contents.
__device__ __forceinline__ void multiply_columns(Accumulators& acc, Stages ring, const ConvShape& shape, Walk walk,
                                                 int tap) {
    for (Run run; walk.next(run, shape);) {
        int previous = 0;
        for (int j = 0; j < run.length; ++j) {
            ring.wait_full();
            Stages reached = ring;
            reached.skip(tap / STRIDE);
            reached.wait_full();
            wgmma_fence();
            const u64 gradients = transposed_descriptor(ring.address() + X_BYTES, STEP_BYTES);
            const u64 inputs = transposed_descriptor(reached.address() + tap % STRIDE * X_COLUMN_BYTES, STEP_BYTES);
#pragma unroll
            for (int row = 0; row < ROWS; ++row)
                multiply(acc, gradients + (row * STEP_BYTES >> 4), inputs + (row * STRIDE * STEP_BYTES >> 4));
            wgmma_commit();
            wgmma_wait<1>();
            if (j > 0) ring.release(previous);
            previous = ring.stage;
            ring.next();
        }
        wgmma_wait<0>();
        ring.release(previous);
        for (int j = 0; j < AHEAD; ++j) {
            ring.wait_full();
            ring.release(ring.stage);
            ring.next();
        }
    }
}

// By one warp.
__device__ __forceinline__ void sum_bias(const unsigned char* stages, Stages ring, const ConvShape& shape, Walk walk,
                                         float* to, int filters) {
    BiasSums sums;
    for (Run run; walk.next(run, shape);)
        for (int j = 0; j < run.length + AHEAD; ++j) {
            ring.wait_full();
            if (j < run.length) sums.add(stages + ring.stage * STAGE_BYTES + X_BYTES, ROWS * IMAGES);
            __syncwarp();
            ring.release(ring.stage);
            ring.next();
        }
    sums.store(to, filters);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_weight_gradient_sm90_window(const __grid_constant__ TensorMap gradient_map,
                                       const __grid_constant__ TensorMap x_map, float* __restrict__ parts,
                                       ConvShape shape, int part_columns) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const Stages ring(shared_address(shared_memory));
    // CTAs over the same pixels are adjacent, so they are read from DRAM once.
    const int tiles_m = (shape.filters + BOX - 1) / BOX;
    const int first_filter = blockIdx.x % tiles_m * BOX, first_channel = blockIdx.x / tiles_m * BOX;
    const bool bias = HAS_BIAS && first_channel == 0;
    begin(ring, WARPGROUPS * 4 + bias, gradient_map, x_map);

    const Walk walk(shape, part_columns);
    const long long pitch = 1LL * TAPS * TAPS * shape.channels, weights = shape.filters * pitch;
    float* part = parts + blockIdx.y * (weights + (HAS_BIAS ? shape.filters : 0));
    const int filters = shape.filters - first_filter, warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        if (threadIdx.x % 128 == 0)
            load_columns(gradient_map, x_map, ring, shape, walk, first_filter, first_channel);
        if (bias && threadIdx.x / 32 % 4 == 1)
            sum_bias(shared_memory, ring, shape, walk, part + weights + first_filter, filters);
        return;
    }
    Accumulators acc = {};
    multiply_columns(acc, ring, shape, walk, warpgroup);

    float* to = part + first_filter * pitch + warpgroup * shape.channels + first_channel;
    const int channels = shape.channels - first_channel;
    store_box<0>(acc, to, pitch, filters, channels);
    store_box<32>(acc, to + TAPS * shape.channels, pitch, filters, channels);
    store_box<64>(acc, to + 2 * TAPS * shape.channels, pitch, filters, channels);
}
