// y[pixel][filter] = finish(sum over k of input[pixel][k] * weight[filter][k])      (conv2d/finish.cuh)
//
// Implicit GEMM on Hopper, NHWC: one CTA per output tile of pixels by filters. TMA loads k-tiles of 128 bytes of
// channels of one filter tap, swizzled and K-major, into a ring of STAGES stages. In im2col mode it walks the output
// pixels across rows and images and pads; past the last channel and filter it fills zeros. wgmma multiplies 64 pixels
// by all filters of the tile directly from smem; accumulators stay in registers until the epilogue.
//   PRODUCER_WARPS  0: a thread of the first warpgroup issues a copy whenever all have released a stage; 1: a producer
//                   warp; 4: a producer warpgroup that gives its registers to the consumers
//   SHORTCUT        a 1x1 convolution of a second image joins the sum: its channels follow as more k-tiles
//   PROMOTE_SLABS   accumulate in fp32 registers after this many k-tiles: FP8 tensor cores keep only about 14 bits
// Limiter: loads from L2 (64 operations per byte with tiles of 128x128), then tensor cores and power.
//
// Rung                 switches
//   tma_wgmma          PRODUCER_WARPS 0
//   producer_consumer  PRODUCER_WARPS 1 or 4
// Read products.cuh (wgmma of the mainloop), then finish.cuh (epilogue).
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                   // problem.dtype
using Output = float;                    // output
using Bias = float;                      // bias
constexpr int TILE_M = 64;               // config.pixels: output pixels per tile
constexpr int TILE_N = 64;               // config.filters
constexpr int WARPGROUPS = 1;            // config.warpgroups: consumer warpgroups
constexpr int STAGES = 4;                // config.stages
constexpr int BLOCKS_PER_SM = 3;         // config.blocks_per_sm
constexpr int PRODUCER_WARPS = 0;        // config.producer_warps: producer warps
constexpr int PROMOTE_SLABS = 0;         // promote_slabs
constexpr bool SHORTCUT = false;         // problem.shortcut_channels > 0
constexpr bool FILTERS_ALIGNED = false;  // problem.filters % config.filters == 0
constexpr bool FILTERS_EVEN = true;      // problem.filters % 2 == 0
constexpr bool HAS_MASK = false;         // False
constexpr bool HAS_BIAS = false;         // problem.bias
constexpr bool HAS_RESIDUAL = false;     // problem.residual
constexpr bool HAS_RELU = false;         // problem.relu
#endif

#include "common/ring.cuh"
#include "conv2d/finish.cuh"
#include "conv2d/products.cuh"

constexpr int ROW_BYTES = 128;                     // swizzle span
constexpr int K_TILE = ROW_BYTES / sizeof(Element);  // channels per stage
constexpr int PIXEL_BYTES = TILE_M * ROW_BYTES;
constexpr int STAGE_BYTES = PIXEL_BYTES + TILE_N * ROW_BYTES;
constexpr int BLOCKS_M = TILE_M / (64 * WARPGROUPS);  // 64-row MMAs per warpgroup
static_assert(BLOCKS_M * 64 * WARPGROUPS == TILE_M, "warpgroups share the pixels of a tile evenly");
constexpr int THREADS = WARPGROUPS * 128 + PRODUCER_WARPS * 32;
constexpr bool PRODUCER = PRODUCER_WARPS > 0;
constexpr bool MOVES_REGISTERS = PRODUCER_WARPS == 4;  // setmaxnreg works on whole warpgroups
static_assert(!MOVES_REGISTERS || (WARPGROUPS == 2 && BLOCKS_PER_SM == 1),
              "128 * 40 + 256 * 232 registers are all of an SM's");

using Accumulators = float[BLOCKS_M][TILE_N / 2];

using Stages = Ring<STAGES, STAGE_BYTES>;  // pixels, then weights

struct Maps {
    const TensorMap &pixels, &weights, &shortcut, &shortcut_weights;
};

// Issues the copies of a tile by k-tile: all channels of a tap, then the next tap. Called by one thread.
struct Loader {
    const Maps& maps;
    const ConvShape& shape;
    Stages ring;
    int first_filter;
    int n, row, column;  // of the first output pixel
    int shortcut_stride, shortcut_k_tiles;
    int left;  // k-tiles still to load
    int c = 0, tap = 0, r = 0, s = 0;

    __device__ __forceinline__ Loader(const Maps& maps, const Stages& ring, const ConvShape& shape,
                                      const ShortcutShape& shortcut, int first_pixel, int first_filter)
        : maps(maps), shape(shape), ring(ring), first_filter(first_filter), shortcut_stride(shortcut.stride) {
        const int image_row = first_pixel / shape.output_width;
        n = image_row / shape.output_height;
        row = image_row % shape.output_height;
        column = first_pixel % shape.output_width;
        shortcut_k_tiles = SHORTCUT ? (shortcut.channels + K_TILE - 1) / K_TILE : 0;
        left = shape.filter_height * shape.filter_width * ((shape.channels + K_TILE - 1) / K_TILE) + shortcut_k_tiles;
    }

    // Waits until the stage is free.
    __device__ __forceinline__ void load() {
        ring.wait_empty();
        barrier_expect(ring.full(ring.stage), STAGE_BYTES);
        if (SHORTCUT && left <= shortcut_k_tiles) load_shortcut();
        else load_tap();
        ring.next();
        --left;
    }

private:
    __device__ __forceinline__ void load_tap() {
        const u32 full = ring.full(ring.stage);
        tma_load_im2col(ring.address(), maps.pixels, full, c, column * shape.stride_w - shape.pad_w,
                        row * shape.stride_h - shape.pad_h, n, s * shape.dilation_w, r * shape.dilation_h);
        tma_load_3d(ring.address() + PIXEL_BYTES, maps.weights, full, c, tap, first_filter);
        c += K_TILE;
        if (c < shape.channels) return;
        c = 0;
        ++tap;
        if (++s == shape.filter_width) {
            s = 0;
            ++r;
        }
    }

    __device__ __forceinline__ void load_shortcut() {
        const u32 full = ring.full(ring.stage);
        const int channel = (shortcut_k_tiles - left) * K_TILE;
        tma_load_im2col(ring.address(), maps.shortcut, full, channel, column * shortcut_stride, row * shortcut_stride, n,
                        0, 0);
        tma_load_3d(ring.address() + PIXEL_BYTES, maps.shortcut_weights, full, channel, 0, first_filter);
    }
};

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i)
#pragma unroll
        for (int e = 0; e < TILE_N / 2; ++e) acc[i][e] = 0.f;
}

__device__ __forceinline__ void add(Accumulators& acc, const Accumulators& more) {
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i)
#pragma unroll
        for (int e = 0; e < TILE_N / 2; ++e) acc[i][e] += more[i][e];
}

// A stage is released once the MMAs of the next are issued, so the tensor cores never run dry.
__device__ __forceinline__ void multiply_k_tiles(Accumulators& acc, Stages& ring, Loader& loader, int k_tiles,
                                                 int first_row) {
    Accumulators part;  // k-tiles since the last promotion, with PROMOTE_SLABS
    Accumulators& target = PROMOTE_SLABS ? part : acc;
    if (PROMOTE_SLABS) clear(acc);
    int previous = 0, in_part = 0;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        ring.wait_full();
        const u64 pixels = operand_descriptor(ring.address() + first_row * ROW_BYTES);
        const u64 weights = operand_descriptor(ring.address() + PIXEL_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < ROW_BYTES / 32; ++step)
#pragma unroll
            for (int i = 0; i < BLOCKS_M; ++i)
                multiply<Element>(target[i], pixels + step * 2 + i * (64 * ROW_BYTES >> 4), weights + step * 2,
                                  in_part || step);
        wgmma_commit();
        wgmma_wait<1>();
        if (k_tile > 0) {
            ring.release(previous);
            if (!PRODUCER) {
                if (threadIdx.x == 0 && loader.left > 0) loader.load();
                __syncwarp();
            }
        }
        previous = ring.stage;
        ring.next();
        ++in_part;
        if (PROMOTE_SLABS && (in_part == PROMOTE_SLABS || k_tile + 1 == k_tiles)) {
            wgmma_wait<0>();
            add(acc, part);
            in_part = 0;
        }
    }
    wgmma_wait<0>();
    // The last stage needs no release: nothing waits for it.
}

// In every 8 filters a lane holds two adjacent ones, of rows lane / 4 and lane / 4 + 8 of its warp's 16. The four lanes
// of a row store 8 consecutive elements.
__device__ __forceinline__ void store(const Accumulators& acc, const Finish& finish, int warp_pixel, int first_filter,
                                      const ConvShape& shape, Output* y) {
    const int lane = threadIdx.x % 32;
    const int pixels = shape.batch * shape.output_height * shape.output_width;
    const int first_pixel = warp_pixel + lane / 4;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
        const int filter = first_filter + j * 8 + lane % 4 * 2;
        const FilterPair filters = finish.of(filter);
#pragma unroll
        for (int i = 0; i < BLOCKS_M; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int pixel = first_pixel + i * 64 + half * 8;
                const float* pair = &acc[i][j * 4 + half * 2];
                if (pixel < pixels)
                    finish.store_pair(pair[0], pair[1], filters, filter, 1LL * pixel * shape.filters, y);
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_sm90_wgmma(const __grid_constant__ TensorMap pixel_map, const __grid_constant__ TensorMap weight_map,
                      const __grid_constant__ TensorMap shortcut_map,
                      const __grid_constant__ TensorMap shortcut_weight_map, const Bias* __restrict__ bias,
                      const float* __restrict__ scale, const float* __restrict__ scales,
                      const Element* __restrict__ residual, Output* __restrict__ y, ConvShape shape,
                      ShortcutShape shortcut_shape) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    Stages ring(shared_address(shared_memory));
    if (threadIdx.x == 0) {
        ring.init(WARPGROUPS * 4);
        fence_barrier_init();
        prefetch_map(pixel_map);
        prefetch_map(weight_map);
    }
    wait_for_previous_launch();
    __syncthreads();

    // CTAs over the same pixels are adjacent, so x is read from DRAM once.
    const int tiles_n = (shape.filters + TILE_N - 1) / TILE_N;
    const int first_pixel = blockIdx.x / tiles_n * TILE_M;
    const int first_filter = blockIdx.x % tiles_n * TILE_N;
    const Maps maps{pixel_map, weight_map, shortcut_map, shortcut_weight_map};
    Loader loader(maps, ring, shape, shortcut_shape, first_pixel, first_filter);
    const int k_tiles = loader.left;
    const int warpgroup = threadIdx.x / 128;
    if (PRODUCER && warpgroup == WARPGROUPS) {
        if constexpr (MOVES_REGISTERS) release_registers<40>();
        if (threadIdx.x % 128 == 0)
            while (loader.left > 0) loader.load();
        return;
    }
    if constexpr (MOVES_REGISTERS) claim_registers<232>();
    if (!PRODUCER) {
        if (threadIdx.x == 0)
            for (int stage = 0; stage < STAGES && loader.left > 0; ++stage) loader.load();
        __syncwarp();
    }
    Accumulators acc;
    const int first_row = warpgroup * BLOCKS_M * 64;
    multiply_k_tiles(acc, ring, loader, k_tiles, first_row);
    const Finish finish{bias, scale, scales, residual, shape.filters};
    store(acc, finish, first_pixel + first_row + threadIdx.x / 32 % 4 * 16, first_filter, shape, y);
}
