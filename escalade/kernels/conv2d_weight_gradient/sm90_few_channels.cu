// parts[part][k][r][s][c] = sum over the part's pixels p of gradient[p][k] * x[window(p, r, s)][c]; for the bias, of
// gradient[p][k] alone
//
// Few channels on Hopper, NHWC. x is packed to 16-byte pixels with the channels of GROUP rows each
// (sm90_few_channels_pack.cu); the 8 pixels from a window's corner on, 128 contiguous bytes, form a box: 64 columns of
// the MMA, up to 8 taps of GROUP filter rows. TMA loads boxes from an image whose rows overlap. An MMA covers 16
// adjacent output pixels; a k-tile has ROWS output rows of them (a divisor of all), and the packed rows that these
// share: the next box is ROW_JUMP packed rows further, the next output row ROW_PITCH. Accumulators are stored as fp32
// parts, reduced by a second launch in a fixed order. In CTAs of the first columns, warps of the producer warpgroup sum
// the gradients for the bias.
// Limiter: tensor cores, whose columns are partly padding (3 channels, 7x7: 147 of 256), and memory.
//
// Rung: `few_channels`. Read sm90_tile.cuh (shared with the other Hopper kernels here).
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = __half;           // problem.dtype
constexpr bool HAS_BIAS = true;   // problem.bias
constexpr int CHANNELS = 8;       // forward.channels
constexpr int GROUP = 1;          // packing.group
constexpr bool BF16 = false;      // forward.dtype == "bf16"
constexpr int WARPGROUPS_M = 1;   // config.warpgroups_m: consumer warpgroups along the filters, 64 each
constexpr int WARPGROUPS_N = 1;   // config.warpgroups_n
constexpr int BOXES = 4;          // config.boxes: 64-column boxes per warpgroup
constexpr int ROWS = 1;           // config.rows: output rows per k-tile
constexpr int ROW_PITCH = 2;      // packing.row_pitch
constexpr int ROW_JUMP = 1;       // packing.row_jump
constexpr int STAGES = 8;         // config.stages
constexpr int BLOCKS_PER_SM = 1;  // config.blocks_per_sm
#endif

#include "conv2d_weight_gradient/sm90_tile.cuh"

constexpr int SLOTS = 8 / GROUP;  // channels per row
constexpr int PIXELS = STEP_PIXELS;
constexpr int TILE_BOXES = WARPGROUPS_N * BOXES;
constexpr int X_ROWS = (ROWS - 1) * ROW_PITCH + (TILE_BOXES - 1) * ROW_JUMP + 1;
constexpr int X_BYTES = X_ROWS * STEP_BYTES;
constexpr int GRADIENT_BYTES = ROWS * STEP_BYTES;  // of 64 filters
constexpr int STAGE_BYTES = X_BYTES + WARPGROUPS_M * GRADIENT_BYTES;
constexpr int WARPGROUPS = WARPGROUPS_M * WARPGROUPS_N;
constexpr int THREADS = (WARPGROUPS + 1) * 128;
static_assert(WARPGROUPS_M <= 3, "every 64 filters of a CTA have a bias warp");

using Accumulators = float[BOXES * 32];
using Stages = Ring<STAGES, STAGE_BYTES>;  // rows of x, then gradients

// Work of a CTA: blockIdx.x is the tile, blockIdx.y the part of the k-tiles. CTAs over the same pixels are adjacent, so
// they are read from DRAM once.
struct Tile {
    int first_filter, first_box;
    int strips, runs;  // per image: k-tiles down and across
    int first_k_tile, k_tiles;

    __device__ __forceinline__ Tile(const ConvShape& shape, int part_k_tiles) {
        constexpr int FILTERS = WARPGROUPS_M * BOX;
        const int tiles_m = (shape.filters + FILTERS - 1) / FILTERS;
        first_filter = blockIdx.x % tiles_m * FILTERS;
        first_box = blockIdx.x / tiles_m * TILE_BOXES;
        strips = shape.output_height / ROWS;
        runs = (shape.output_width + PIXELS - 1) / PIXELS;
        first_k_tile = blockIdx.y * part_k_tiles;
        k_tiles = min(part_k_tiles, shape.batch * strips * runs - first_k_tile);
    }
};

// Issues the copies by k-tile. Both operands are zero right of the image. Called by one thread.
__device__ __forceinline__ void load_k_tiles(const TensorMap& gradient_map, const TensorMap& x_map, Stages ring,
                                             const Tile& tile) {
    for (int k_tile = tile.first_k_tile; k_tile < tile.first_k_tile + tile.k_tiles; ++k_tile) {
        const int strip = k_tile / tile.runs, column = k_tile % tile.runs * PIXELS;
        const int n = strip / tile.strips, row = strip % tile.strips * ROWS;
        const u32 full = ring.full(ring.stage);
        ring.wait_empty();
        barrier_expect(full, STAGE_BYTES);
        tma_load_4d(ring.address(), x_map, full, 0, column, row * ROW_PITCH + tile.first_box * ROW_JUMP, n);
#pragma unroll
        for (int i = 0; i < WARPGROUPS_M; ++i)
            tma_load_4d(ring.address() + X_BYTES + i * GRADIENT_BYTES, gradient_map, full, tile.first_filter + i * BOX,
                        column, row, n);
        ring.next();
    }
}

// A stage is released once the MMAs of the next are issued, so the tensor cores never run dry.
__device__ __forceinline__ void multiply_k_tiles(Accumulators& acc, Stages ring, int k_tiles, int row_box,
                                                 int column_box) {
    int previous = 0;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        ring.wait_full();
        const u64 gradients = transposed_descriptor(ring.address() + X_BYTES + row_box * GRADIENT_BYTES, STEP_BYTES);
        const u64 inputs =
            transposed_descriptor(ring.address() + column_box * ROW_JUMP * STEP_BYTES, ROW_JUMP * STEP_BYTES);
        wgmma_fence();
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
            multiply(acc, gradients + (row * STEP_BYTES >> 4), inputs + (row * ROW_PITCH * STEP_BYTES >> 4));
        wgmma_commit();
        wgmma_wait<1>();
        if (k_tile > 0) ring.release(previous);
        previous = ring.stage;
        ring.next();
    }
    wgmma_wait<0>();
    // The last stage needs no release: nothing waits for it.
}

// 64 filters, by one warp.
__device__ __forceinline__ void sum_bias(const unsigned char* gradients, Stages ring, int k_tiles, float* to,
                                         int filters) {
    BiasSums sums;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        ring.wait_full();
        sums.add(gradients + ring.stage * STAGE_BYTES, ROWS * PIXELS);
        __syncwarp();
        ring.release(ring.stage);
        ring.next();
    }
    sums.store(to, filters);
}

// 64 filters, and the boxes from `first_box` on: every 8 columns of a box are one tap, the channels of GROUP rows.
__device__ __forceinline__ void store_boxes(const Accumulators& acc, float* part, const ConvShape& shape,
                                            int first_filter, int first_box) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int at = 0; at < BOXES * 32; ++at) {
        const int box = at / 32, s = at / 4 % 8, half = at / 2 % 2, within = lane % 4 * 2 + at % 2;
        const int k = first_filter + warp * 16 + half * 8 + lane / 4;
        const int r = (first_box + box) * GROUP + within / SLOTS, c = within % SLOTS;
        if (k < shape.filters && r < shape.filter_height && s < shape.filter_width && c < CHANNELS)
            part[((1LL * k * shape.filter_height + r) * shape.filter_width + s) * CHANNELS + c] = acc[at];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_weight_gradient_sm90_few_channels(const __grid_constant__ TensorMap gradient_map,
                                             const __grid_constant__ TensorMap x_map, float* __restrict__ parts,
                                             ConvShape shape, int part_k_tiles) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const Stages ring(shared_address(shared_memory));
    const Tile tile(shape, part_k_tiles);
    const bool bias = HAS_BIAS && tile.first_box == 0;
    begin(ring, WARPGROUPS * 4 + (bias ? WARPGROUPS_M : 0), gradient_map, x_map);

    const long long weights = 1LL * shape.filters * shape.filter_height * shape.filter_width * CHANNELS;
    float* part = parts + blockIdx.y * (weights + (HAS_BIAS ? shape.filters : 0));
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        const int box = threadIdx.x / 32 % 4 - 1;
        if (threadIdx.x % 128 == 0) load_k_tiles(gradient_map, x_map, ring, tile);
        if (bias && 0 <= box && box < WARPGROUPS_M) {
            const int first_filter = tile.first_filter + box * BOX;
            sum_bias(shared_memory + X_BYTES + box * GRADIENT_BYTES, ring, tile.k_tiles, part + weights + first_filter,
                     shape.filters - first_filter);
        }
        return;
    }
    const int row_box = warpgroup % WARPGROUPS_M, column_box = warpgroup / WARPGROUPS_M * BOXES;
    Accumulators acc = {};
    multiply_k_tiles(acc, ring, tile.k_tiles, row_box, column_box);
    store_boxes(acc, part, shape, tile.first_filter + row_box * BOX, tile.first_box + column_box);
}
