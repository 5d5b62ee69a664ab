// parts[part][k][r][s][c] = sum over the part's pixels p of gradient[p][k] * x[window(p, r, s)][c]; for the bias, of
// gradient[p][k] alone
//
// A GEMM over output pixels on Hopper, NHWC: one CTA per tile of TILE_M filters by TILE_N columns (boxes of 64 channels
// of a tap) and part of the pixels. TMA loads k-tiles of 64 pixels into a ring of stages, windows in im2col mode; wgmma
// takes both operands MN-major, as in memory, pixel by pixel. Accumulators are stored as fp32 parts, reduced by a
// second launch in a fixed order; one part is the result (sums.cuh). In CTAs of the first columns, eight further columns
// of ones sum the gradients for the bias: CUDA cores would take longer for a k-tile than the tensor cores, and the
// launch would wait for these CTAs. With groups a tile has the filters of as many groups as fit a box, by their channels: one box per tap. Products of
// different groups are computed as well and not stored.
// Limiter: loads from L2, 48 bytes per cycle with tiles of 128x256; with few filters or channels, memory.
//
// Rungs: `wgmma`, `wgmma_groups`; `wgmma_split` with halves of fp32. Read sm90_tile.cuh (shared with the other Hopper
// kernels here).
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = __half;            // problem.dtype
constexpr bool HAS_BIAS = true;    // problem.bias
constexpr bool BF16 = false;       // forward.dtype == "bf16"
constexpr int TILE_M = 128;        // config.filters: filters per tile
constexpr int TILE_N = 128;        // config.columns: columns per tile
constexpr int WARPGROUPS = 2;      // config.warpgroups: consumer warpgroups
constexpr int STAGES = 6;          // config.stages
constexpr int BLOCKS_PER_SM = 1;   // config.blocks_per_sm
constexpr int GROUP_FILTERS = 0;   // forward.group_filters if forward.groups > 1 else 0
constexpr int GROUP_CHANNELS = 0;  // forward.group_channels if forward.groups > 1 else 0
constexpr int GROUPS = 1;          // groups: groups per tile
constexpr bool DIRECT = false;      // direct
#define VOLUMES 0         // int(windows.frames is not None): a macro, as constants are part of the machine code for images too
#define FRAMES 1          // windows.frames.output if windows.frames else 1: frames of y per volume
#define FRAME_ROWS 1      // windows.taps[0] if windows.frames else 1: rows of taps per frame
#define FRAME_STRIDE 1    // windows.frames.stride if windows.frames else 1
#define FRAME_PAD 0       // windows.frames.padding if windows.frames else 0
#define FRAME_DILATION 1  // windows.frames.dilation if windows.frames else 1
#endif

#include "common/wgmma_widths.cuh"
#include "conv2d_weight_gradient/sm90_tile.cuh"
#include "conv2d_weight_gradient/sums.cuh"

constexpr int K_TILE = 64;  // pixels per stage
constexpr int BOX_BYTES = K_TILE * ROW_BYTES;
constexpr int BOXES_M = TILE_M / BOX, BOXES_N = TILE_N / BOX;
constexpr int STAGE_BYTES = (BOXES_M + BOXES_N) * BOX_BYTES;
constexpr int WARPGROUPS_M = BOXES_M >= WARPGROUPS ? WARPGROUPS : 1, WARPGROUPS_N = WARPGROUPS / WARPGROUPS_M;
constexpr int BLOCKS_M = BOXES_M / WARPGROUPS_M, BLOCKS_N = BOXES_N / WARPGROUPS_N;  // boxes per warpgroup
static_assert(BLOCKS_M * WARPGROUPS_M == BOXES_M && BLOCKS_N * WARPGROUPS_N == BOXES_N,
              "warpgroups divide the boxes evenly");
constexpr int THREADS = (WARPGROUPS + 1) * 128;
constexpr bool MOVES_REGISTERS = WARPGROUPS == 2 && BLOCKS_PER_SM == 1;  // 128 * 40 + 256 * 232 registers are all
constexpr int ONES_BYTES = 256;  // 8 columns of 16 pixels, behind the ring

constexpr bool GROUPED = GROUP_FILTERS > 0;
constexpr int STEP_M = GROUPED ? GROUPS * GROUP_FILTERS : TILE_M;  // filters from tile to tile
static_assert(!GROUPED || (TILE_M == BOX && STEP_M <= BOX && GROUPS * GROUP_CHANNELS <= BOX), "a tile has whole groups");

using Accumulators = float[BLOCKS_M][BLOCKS_N * 32];
using BiasAccumulators = float[BLOCKS_M][4];  // of 64 filters by 8 columns, which are all the same
using Stages = Ring<STAGES, STAGE_BYTES>;  // gradients, then inputs

// Work of a CTA: blockIdx.x is the tile, blockIdx.y the part of the pixels. CTAs over the same pixels are adjacent, so
// they are read from DRAM once.
struct Tile {
    int first_filter, filters;     // the first, and how many are stored
    int first_box, first_channel;  // boxes are numbered tap by tap
    int channel_boxes, boxes;      // per tap, and in all
    int first_k_tile, k_tiles;

    __device__ __forceinline__ Tile(const ConvShape& shape, int part_k_tiles) {
        const int tiles_m = (shape.filters + STEP_M - 1) / STEP_M;
        first_filter = blockIdx.x % tiles_m * STEP_M;
        filters = GROUPED ? min(STEP_M, shape.filters - first_filter) : shape.filters - first_filter;
        first_box = blockIdx.x / tiles_m * BOXES_N;
        first_channel = GROUPED ? blockIdx.x % tiles_m * GROUPS * GROUP_CHANNELS : 0;
        channel_boxes = GROUPED ? 1 : (shape.channels + BOX - 1) / BOX;
        boxes = shape.filter_height * shape.filter_width * channel_boxes;
        first_k_tile = blockIdx.y * part_k_tiles;
        const int all = (shape.batch * shape.output_height * shape.output_width + K_TILE - 1) / K_TILE;
        k_tiles = min(part_k_tiles, all - first_k_tile);
    }
};

// Issues the copies by k-tile. Called by one thread.
__device__ __forceinline__ void load_k_tiles(const TensorMap& gradient_map, const TensorMap& pixel_map, Stages ring,
                                             const ConvShape& shape, const Tile& tile) {
    int channels[BOXES_N];
    u16 taps_d[BOXES_N], taps_h[BOXES_N], taps_w[BOXES_N];
#pragma unroll
    for (int j = 0; j < BOXES_N; ++j) {
        const int box = min(tile.first_box + j, tile.boxes - 1);  // past the last, repeats it: never stored
        const int tap = box / tile.channel_boxes;
        channels[j] = tile.first_channel + box % tile.channel_boxes * BOX;
        const int row = tap / shape.filter_width;
        taps_d[j] = row / FRAME_ROWS * FRAME_DILATION;
        taps_h[j] = (VOLUMES ? row % FRAME_ROWS : row) * shape.dilation_h;
        taps_w[j] = tap % shape.filter_width * shape.dilation_w;
    }
    for (int k_tile = 0; k_tile < tile.k_tiles; ++k_tile) {
        const int pixel = (tile.first_k_tile + k_tile) * K_TILE;
        const int row = pixel / shape.output_width;
        const int n = row / shape.output_height;
        const int h = row % shape.output_height * shape.stride_h - shape.pad_h;
        const int w = pixel % shape.output_width * shape.stride_w - shape.pad_w;
        const u32 full = ring.full(ring.stage);
        ring.wait_empty();
        barrier_expect(full, STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < BOXES_M; ++i)
            tma_load_2d(ring.address() + i * BOX_BYTES, gradient_map, full, tile.first_filter + i * BOX, pixel);
#pragma unroll
        for (int j = 0; j < BOXES_N; ++j)
            if constexpr (VOLUMES)
                tma_load_im2col_5d(ring.address() + (BOXES_M + j) * BOX_BYTES, pixel_map, full, channels[j], w, h,
                                   n % FRAMES * FRAME_STRIDE - FRAME_PAD, n / FRAMES, taps_w[j], taps_h[j], taps_d[j]);
            else
                tma_load_im2col(ring.address() + (BOXES_M + j) * BOX_BYTES, pixel_map, full, channels[j], w, h, n,
                                taps_w[j], taps_h[j]);
        ring.next();
    }
}

// sums[64 filters][columns] += gradients * ones over 16 pixels.
template <int COUNT>
__device__ __forceinline__ void add_bias(float (&sums)[COUNT], u64 gradients, u64 ones) {
    if constexpr (BF16) wgmma_bf16_rows_transposed(sums, gradients, ones, 1);
    else wgmma_rows_transposed(sums, gradients, ones, 1);
}

// A stage is released once the MMAs of the next are issued, so the tensor cores never run dry.
template <bool WITH_BIAS>
__device__ __forceinline__ void multiply_k_tiles(Accumulators& acc, BiasAccumulators& bias, u64 ones, Stages ring, int k_tiles,
                                                 int row_box, int column_box) {
    int previous = 0;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        ring.wait_full();
        const u64 gradients = transposed_descriptor(ring.address() + row_box * BOX_BYTES, BOX_BYTES);
        const u64 inputs = transposed_descriptor(ring.address() + (BOXES_M + column_box) * BOX_BYTES, BOX_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_TILE / STEP_PIXELS; ++step)
#pragma unroll
            for (int i = 0; i < BLOCKS_M; ++i) {
                const u64 rows = gradients + (i * BOX_BYTES + step * STEP_BYTES >> 4);
                multiply(acc[i], rows, inputs + (step * STEP_BYTES >> 4));
                if constexpr (WITH_BIAS) add_bias(bias[i], rows, ones);
            }
        wgmma_commit();
        wgmma_wait<1>();
        if (k_tile > 0) ring.release(previous);
        previous = ring.stage;
        ring.next();
    }
    wgmma_wait<0>();
    // The last stage needs no release: nothing waits for it.
}

// Four lanes have the sums of a filter. The first `filters` are stored.
__device__ __forceinline__ void store_bias(const BiasAccumulators& bias, Sum* to, int filters) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int filter = i * BOX + row + half * 8;
            if (lane % 4 == 0 && filter < filters) to[filter] = from_float<Sum>(bias[i][half * 2]);
        }
}

// Stores one tap of a tile's groups: of each filter, those of the 64 channels that are its group's.
template <int FIRST>
__device__ __forceinline__ void store_groups(const Accumulators& acc, Sum* to, long long pitch, int filters) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16 + lane / 4, first_column = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + half * 8;
        if (row >= filters) continue;
        const int own = row / GROUP_FILTERS * GROUP_CHANNELS;  // the group's first channel
#pragma unroll
        for (int i = 0; i < BOX / 4; ++i) {
            const int channel = i / 2 * 8 + first_column + i % 2 - own;
            if (0 <= channel && channel < GROUP_CHANNELS)
                to[row * pitch + channel] = from_float<Sum>(acc[0][FIRST + i / 2 * 4 + half * 2 + i % 2]);
        }
    }
}

template <int I, int J>
__device__ __forceinline__ void store_boxes(const Accumulators& acc, const Tile& tile, const ConvShape& shape,
                                            int row_box, int column_box, Sum* to) {
    const int box = tile.first_box + column_box + J, filter = tile.first_filter + (row_box + I) * BOX;
    if (GROUPED) {
        const long long pitch = 1LL * tile.boxes * GROUP_CHANNELS;
        if (box < tile.boxes)
            store_groups<J * 32>(acc, to + tile.first_filter * pitch + box * GROUP_CHANNELS, pitch, tile.filters);
    } else if (box < tile.boxes) {
        const int channel = box % tile.channel_boxes * BOX;
        const long long pitch = 1LL * shape.filter_height * shape.filter_width * shape.channels;
        store_box<J * 32>(acc[I], to + filter * pitch + box / tile.channel_boxes * shape.channels + channel, pitch,
                          shape.filters - filter, shape.channels - channel);
    }
    if constexpr (J + 1 < BLOCKS_N) store_boxes<I, J + 1>(acc, tile, shape, row_box, column_box, to);
    else if constexpr (I + 1 < BLOCKS_M) store_boxes<I + 1, 0>(acc, tile, shape, row_box, column_box, to);
}

// A warpgroup's boxes. Both versions have accumulators of their own: shared ones would make the compiler wait for each
// wgmma.
template <bool WITH_BIAS>
__device__ __forceinline__ void compute(const Stages& ring, const Tile& tile, const ConvShape& shape, int row_box,
                                        int column_box, const Sums& to) {
    Accumulators acc = {};
    BiasAccumulators bias = {};
    const u64 ones = overlapping_descriptor(ring.stages + Stages::BYTES, ONES_BYTES / 2, ONES_BYTES / 2);
    multiply_k_tiles<WITH_BIAS>(acc, bias, ones, ring, tile.k_tiles, row_box, column_box);
    store_boxes<0, 0>(acc, tile, shape, row_box, column_box, to.weights);
    const int filter = row_box * BOX;
    if (WITH_BIAS && to.bias != nullptr)
        store_bias(bias, to.bias + tile.first_filter + filter, tile.filters - filter);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_weight_gradient_sm90_wgmma(const __grid_constant__ TensorMap gradient_map,
                                      const __grid_constant__ TensorMap pixel_map, Sum* __restrict__ parts,
                                      Sum* __restrict__ bias_gradient, ConvShape shape, int part_k_tiles) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const Stages ring(shared_address(shared_memory));
    const Tile tile(shape, part_k_tiles);
    if (HAS_BIAS && threadIdx.x < ONES_BYTES / 4) {
        const Element one = from_float<Element>(1.f);
        store_pack(reinterpret_cast<Element*>(shared_memory + Stages::BYTES) + threadIdx.x * 2,
                   Pack<Element, 2>{{one, one}});
        fence_async_proxy();
    }
    begin(ring, WARPGROUPS * 4, gradient_map, pixel_map);

    const long long filter_elements = 1LL * shape.filter_height * shape.filter_width *
                                      (GROUPED ? GROUP_CHANNELS : shape.channels);
    const Sums own(parts, bias_gradient, blockIdx.y, shape.filters * filter_elements, shape.filters);
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        if constexpr (MOVES_REGISTERS) release_registers<40>();
        if (threadIdx.x % 128 == 0) load_k_tiles(gradient_map, pixel_map, ring, shape, tile);
        return;
    }
    if constexpr (MOVES_REGISTERS) claim_registers<232>();
    const int row_box = warpgroup % WARPGROUPS_M * BLOCKS_M, column_box = warpgroup / WARPGROUPS_M * BLOCKS_N;
    if (HAS_BIAS && tile.first_box + column_box == 0)
        compute<true>(ring, tile, shape, row_box, column_box, own);
    else compute<false>(ring, tile, shape, row_box, column_box, own);
}
