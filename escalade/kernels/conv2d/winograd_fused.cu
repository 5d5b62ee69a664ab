// y of a tile = A' [sum over channels of (B' d B) * U] A, then bias, residual and ReLU, in one launch.
//
// V and M are never stored in global memory. A CTA has 32 tiles and BLOCK_FILTERS filters. Four producer warps
// transform the patches of four channels into smem and load the matching slice of U, while the other warps multiply the
// previous slices: each has WARP_POINTS of the (TILE + 2)^2 points, accumulated in registers. At the end the points of
// a tile are gathered in smem, and the four warps run the epilogue. The price: patches are transformed again for every
// block of filters, and with small CTAs U is read from L2 more often.
// Limiter: FFMA throughput, closely followed by smem reads.
//
// Rung                 switches
//   winograd_f2_fused  TILE 2, BLOCK_FILTERS 64, WARP_POINTS 2
//   winograd_f4_fused  TILE 4, BLOCK_FILTERS 32, WARP_POINTS 3
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool NHWC = false;          // problem.layout == "nhwc"
constexpr int TILE = 2;               // tile: outputs per side of a tile
constexpr int WARP_POINTS = 2;        // config.warp_points: points per warp
constexpr int BLOCK_FILTERS = 64;     // config.block_filters: filters per CTA
constexpr int CHANNELS = 8;           // problem.channels
constexpr int HEIGHT = 9;             // problem.height
constexpr int WIDTH = 9;              // problem.width
constexpr int FILTERS = 16;           // problem.filters
constexpr bool HAS_BIAS = false;      // problem.bias
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr bool HAS_RELU = false;      // problem.relu
#endif

#include "common/epilogue.cuh"
#include "common/hopper.cuh"
#include "common/ptx.cuh"
#include "common/winograd.cuh"

constexpr int PATCH = Winograd<TILE>::PATCH;
constexpr int POINTS = Winograd<TILE>::POINTS;
constexpr int BLOCK_TILES = 32;
constexpr int STEP_CHANNELS = 4;
constexpr int PATCH_THREADS = BLOCK_TILES * STEP_CHANNELS;  // one channel of one tile each
constexpr int CONSUMER_WARPS = POINTS / WARP_POINTS;
constexpr int THREADS = CONSUMER_WARPS * 32 + PATCH_THREADS;
constexpr int LANE_FILTERS = BLOCK_FILTERS / 8;  // a warp is 4 x 8 lanes of 8 tiles x LANE_FILTERS filters per point
constexpr int TILE_PITCH = BLOCK_TILES + 8;      // lanes that write 4 channels of 8 tiles hit 32 different banks
constexpr int INPUT_SLICE = POINTS * STEP_CHANNELS * TILE_PITCH;
constexpr int WEIGHT_SLICE = POINTS * STEP_CHANNELS * BLOCK_FILTERS;
constexpr int SLICE = INPUT_SLICE + WEIGHT_SLICE;
constexpr int PASS_FILTERS = 8;              // filters whose points are gathered in smem at once
constexpr int PASS_PITCH = BLOCK_TILES + 4;  // 16-byte stores of adjacent filters hit different banks
constexpr int PASSES = BLOCK_FILTERS / PASS_FILTERS;
constexpr int PASS = POINTS * PASS_FILTERS * PASS_PITCH;
static_assert(POINTS % WARP_POINTS == 0, "every warp has the same number of points");
static_assert(2 * PASS <= 2 * SLICE, "two passes reuse the slices' smem");

// Loads, transforms and stages one tile's patch of one channel. All sizes are constants, so that loads use immediate
// offsets.
struct PatchReader {
    static constexpr int PIXEL_STRIDE = NHWC ? CHANNELS : 1, ROW_STRIDE = WIDTH * PIXEL_STRIDE;
    static constexpr int CHANNEL_STRIDE = NHWC ? 1 : HEIGHT * WIDTH;
    const Element* first;  // of this thread's channel in the first step; may be outside the image
    u64 inside;            // bit i * PATCH + j: pixel (i, j) of the patch is inside the image
    int tile, channel;     // in the CTA, in the step
    float patch[PATCH][PATCH];

    __device__ __forceinline__ PatchReader(const Element* x, const ConvShape& shape, const TileGrid& tiles,
                                           int first_tile, int thread) {
        // Lanes run along the contiguous dimension.
        tile = NHWC ? thread / STEP_CHANNELS : thread % BLOCK_TILES;
        channel = NHWC ? thread % STEP_CHANNELS : thread / BLOCK_TILES;
        const bool exists = first_tile + tile < tiles.count;
        const TilePosition position = position_of<TILE>(tiles, exists ? first_tile + tile : 0);
        const int row = position.output_row - shape.pad_h, column = position.output_column - shape.pad_w;
        first = x + 1LL * position.image * CHANNELS * HEIGHT * WIDTH + 1LL * row * ROW_STRIDE +
                1LL * column * PIXEL_STRIDE + 1LL * channel * CHANNEL_STRIDE;
        inside = 0;
#pragma unroll
        for (int point = 0; point < POINTS; ++point) {
            const unsigned r = row + point / PATCH, c = column + point % PATCH;
            inside |= u64(exists && r < HEIGHT && c < WIDTH) << point;
        }
    }

    __device__ __forceinline__ void load(int first_channel) {
        const u64 wanted = first_channel + channel < CHANNELS ? inside : 0;
        const Element* from = first + 1LL * first_channel * CHANNEL_STRIDE;
#pragma unroll
        for (int i = 0; i < PATCH; ++i)
#pragma unroll
            for (int j = 0; j < PATCH; ++j)
                patch[i][j] = wanted >> (i * PATCH + j) & 1 ? to_float(from[i * ROW_STRIDE + j * PIXEL_STRIDE]) : 0.f;
    }

    __device__ __forceinline__ void store(float* slice) {
        transform_input(patch);
        float* to = slice + channel * TILE_PITCH + tile;
#pragma unroll
        for (int point = 0; point < POINTS; ++point)
            to[point * STEP_CHANNELS * TILE_PITCH] = patch[point / PATCH][point % PATCH];
    }
};

// Copies slices of U to smem unchanged; one address per thread, advanced step by step.
struct WeightCopier {
    static constexpr int CHUNKS = BLOCK_FILTERS / 4, POINTS_PER_COPY = PATCH_THREADS / (STEP_CHANNELS * CHUNKS);
    static constexpr int ALL_CHANNELS = (CHANNELS + 3) / 4 * 4, ALL_FILTERS = (FILTERS + 3) / 4 * 4;  // as padded in U
    static_assert(POINTS % POINTS_PER_COPY == 0, "every thread copies the same number of chunks");
    const float* from;
    int position;
    bool wanted;

    __device__ __forceinline__ WeightCopier(const float* weights, int first_filter, int thread) {
        const int filter = first_filter + thread % CHUNKS * 4, channel = thread / CHUNKS % STEP_CHANNELS;
        const int point = thread / (STEP_CHANNELS * CHUNKS);
        from = weights + (1LL * point * ALL_CHANNELS + channel) * ALL_FILTERS + filter;
        position = thread * 4, wanted = filter < ALL_FILTERS;
    }

    __device__ __forceinline__ void copy(float* slice) {
        const u32 to = shared_address(slice + position);
#pragma unroll
        for (int copy_index = 0; copy_index < POINTS / POINTS_PER_COPY; ++copy_index)
            copy_async_16(to + copy_index * PATCH_THREADS * 16,
                          from + 1LL * copy_index * POINTS_PER_COPY * ALL_CHANNELS * ALL_FILTERS, wanted);
        copy_async_commit();
        from += STEP_CHANNELS * ALL_FILTERS;
    }
};

// Epilogue of one output tile of one filter; its points are in smem as [point][filter][tile].
__device__ __forceinline__ void finish_tile(const float* pass, int tile, int filter_in_pass, int filter,
                                            const TilePosition& position, const ConvShape& shape, const Element* bias,
                                            const Element* residual, Element* y) {
    float products[PATCH][PATCH];
#pragma unroll
    for (int point = 0; point < POINTS; ++point)
        products[point / PATCH][point % PATCH] = pass[(point * PASS_FILTERS + filter_in_pass) * PASS_PITCH + tile];
    transform_output(products);
    const int plane = shape.output_height * shape.output_width;
    const long long image = 1LL * position.image * FILTERS * plane;
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int j = 0; j < TILE; ++j) {
            const int row = position.output_row + i, column = position.output_column + j;
            if (row >= shape.output_height || column >= shape.output_width) continue;
            const int pixel = row * shape.output_width + column;
            const long long at = image + (NHWC ? pixel * FILTERS + filter : filter * plane + pixel);
            y[at] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(products[i][j], bias, filter, residual, at);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_winograd_fused(const Element* __restrict__ x, const float* __restrict__ weights, const Element* bias,
                          const Element* residual, Element* __restrict__ y, int filter_blocks, ConvShape shape,
                          TileGrid tiles) {
    wait_for_previous_launch();
    extern __shared__ __align__(16) float shared[];
    const int first_tile = blockIdx.x / filter_blocks * BLOCK_TILES;
    const int first_filter = blockIdx.x % filter_blocks * BLOCK_FILTERS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int lane_tile = lane / 8 * 4, lane_filter = lane % 8 * 4;  // the first four; the others are 16 and 32 further
    const bool is_consumer = warp < CONSUMER_WARPS;

    // Producer and consumer warps have separate code, so that neither holds the other's registers. They synchronize by
    // a pair of named barriers: each kind waits at one and only arrives at the other. Pairs alternate, since a warp may
    // arrive for the next round while others still wait for this one.
    int syncs = 0;
    const auto sync = [&](bool from_consumer) {
        const int pair = 1 + 2 * (syncs++ & 1);
        named_barrier_arrive(pair + from_consumer, THREADS);
        named_barrier_sync(pair + !from_consumer, THREADS);
    };
    if (!is_consumer) {
        const int thread = threadIdx.x - CONSUMER_WARPS * 32;
        PatchReader reader(x, shape, tiles, first_tile, thread);
        WeightCopier copier(weights, first_filter, thread);
        reader.load(0);
        float* slice = shared;
        for (int channel = 0; channel < CHANNELS; channel += STEP_CHANNELS) {
            copier.copy(slice + INPUT_SLICE);
            reader.store(slice);
            reader.load(channel + STEP_CHANNELS);
            copy_async_wait<0>();
            sync(false);  // this slice is complete, and the other is no longer read
            slice = slice == shared ? shared + SLICE : shared;
        }
        sync(false);  // the slices are no longer read
        for (int pass = 0; pass < PASSES; ++pass) {
            sync(false);  // this pass is complete, and the previous one is finished
#pragma unroll 1
            for (int at = thread; at < BLOCK_TILES * PASS_FILTERS; at += PATCH_THREADS) {
                const int tile = NHWC ? at / PASS_FILTERS : at % BLOCK_TILES;
                const int filter_in_pass = NHWC ? at % PASS_FILTERS : at / BLOCK_TILES;
                const int filter = first_filter + pass * PASS_FILTERS + filter_in_pass;
                if (first_tile + tile < tiles.count && filter < FILTERS)
                    finish_tile(shared + pass % 2 * PASS, tile, filter_in_pass, filter,
                                position_of<TILE>(tiles, first_tile + tile), shape, bias, residual, y);
            }
        }
        return;
    }

    float acc[WARP_POINTS][8][LANE_FILTERS] = {};
    const int first_row = warp * WARP_POINTS * STEP_CHANNELS;
    const float* first_input = shared + first_row * TILE_PITCH + lane_tile;
    const float* first_weight = shared + INPUT_SLICE + first_row * BLOCK_FILTERS + lane_filter;
    const auto multiply = [&](int slice) {
        sync(true);
#pragma unroll
        for (int c = 0; c < STEP_CHANNELS; ++c)  // points inside channels: the other order needs a few more registers
#pragma unroll
            for (int p = 0; p < WARP_POINTS; ++p) {
                const float* inputs = first_input + slice * SLICE + (p * STEP_CHANNELS + c) * TILE_PITCH;
                const float* filters = first_weight + slice * SLICE + (p * STEP_CHANNELS + c) * BLOCK_FILTERS;
                const Pack<float, 4> a[2] = {load_pack<float, 4>(inputs), load_pack<float, 4>(inputs + 16)};
                Pack<float, 4> b[LANE_FILTERS / 4];
#pragma unroll
                for (int h = 0; h < LANE_FILTERS / 4; ++h) b[h] = load_pack<float, 4>(filters + h * 32);
#pragma unroll
                for (int i = 0; i < 8; ++i)
#pragma unroll
                    for (int j = 0; j < LANE_FILTERS; ++j) acc[p][i][j] += a[i / 4].at[i % 4] * b[j / 4].at[j % 4];
            }
    };
    // Two steps per iteration, so that the slice is a constant and its address takes no register.
#pragma unroll 1
    for (int channel = 0; channel < CHANNELS; channel += 2 * STEP_CHANNELS) {
        multiply(0);
        if (channel + STEP_CHANNELS < CHANNELS) multiply(1);
    }
    sync(true);

#pragma unroll
    for (int half = 0; half < LANE_FILTERS / 4; ++half)
#pragma unroll 1
        for (int quarter = 0; quarter < 4; ++quarter) {
            float* pass = shared + quarter % 2 * PASS;
            if (lane_filter / PASS_FILTERS == quarter) {
#pragma unroll
                for (int p = 0; p < WARP_POINTS; ++p)
#pragma unroll
                    for (int i = 0; i < 8; i += 4)
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const int row = (warp * WARP_POINTS + p) * PASS_FILTERS + lane_filter % PASS_FILTERS + j;
                            const int f = half * 4 + j;
                            store_pack(
                                pass + row * PASS_PITCH + lane_tile + i * 4,
                                Pack<float, 4>{{acc[p][i][f], acc[p][i + 1][f], acc[p][i + 2][f], acc[p][i + 3][f]}});
                        }
            }
            sync(true);
        }
}
