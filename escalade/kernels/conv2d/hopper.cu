// y[pixel][filter] = relu(sum over k of input[pixel][k] * weight[filter][k] + bias[filter] + residual[pixel][filter])
//
// The implicit GEMM with Hopper's own units, in NHWC: one tile of output pixels and filters a block. The copy engine
// brings slabs of 64 channels of one filter tap into a ring of STAGES stages: it walks the output pixels itself, over
// rows and images, and pads. One instruction of a warpgroup (wgmma) then multiplies 64 pixels with all filters of the
// tile straight from there; sums never leave registers until they are finished and stored.
// Without PRODUCER_WARPS a thread of the first warpgroup starts a copy whenever all have done with a stage; with one,
// a warp of its own does nothing else; with four, a warpgroup that leaves its registers to those that multiply.
// What bounds it: the copies from L2, 64 operations a byte with tiles of 128x128, then tensor cores and power.
#include "common/conv_shape.cuh"
#include "common/epilogue.cuh"
#include "common/ring.cuh"

constexpr int SLAB = 64;  // channels of a stage
constexpr int ROW_BYTES = SLAB * sizeof(Element);
static_assert(ROW_BYTES == 128, "a row is what the swizzle spans");
constexpr int PIXEL_BYTES = TILE_M * ROW_BYTES;
constexpr int STAGE_BYTES = PIXEL_BYTES + TILE_N * ROW_BYTES;
constexpr int BLOCKS_M = TILE_M / (64 * WARPGROUPS);  // a warpgroup's, of 64 pixels
static_assert(BLOCKS_M * 64 * WARPGROUPS == TILE_M, "warpgroups share the pixels of a tile evenly");
constexpr int THREADS = WARPGROUPS * 128 + PRODUCER_WARPS * 32;
constexpr bool PRODUCER = PRODUCER_WARPS > 0;
constexpr bool HANDS_OVER = PRODUCER_WARPS == 4;  // registers: a matter of whole warpgroups
static_assert(!HANDS_OVER || (WARPGROUPS == 2 && BLOCKS_PER_SM == 1), "128 * 40 + 256 * 232 registers are all");

using Sums = float[BLOCKS_M][TILE_N / 2];

__device__ __forceinline__ void multiply(float (&sums)[TILE_N / 2], u64 pixels, u64 weights, bool accumulate) {
    if constexpr (BF16) wgmma_bf16(sums, pixels, weights, accumulate);
    else wgmma(sums, pixels, weights, accumulate);
}

using Stages = Ring<STAGES, STAGE_BYTES>;  // pixels, then weights

// Starts the copies of a tile, slab after slab: all channels of a tap, then the next tap. For one thread.
struct Loader {
    const TensorMap &pixel_map, &weight_map;
    Stages ring;
    int first_filter, channels, filter_width;
    int n, h, w;  // of the first window's corner
    int left;     // slabs yet to come
    int c = 0, r = 0, s = 0, k = 0;

    __device__ __forceinline__ Loader(const TensorMap& pixel_map, const TensorMap& weight_map, const Stages& ring,
                                      const ConvShape& shape, int first_pixel, int first_filter, int slabs)
        : pixel_map(pixel_map), weight_map(weight_map), ring(ring), first_filter(first_filter),
          channels(shape.channels), filter_width(shape.filter_width), left(slabs) {
        const int row = first_pixel / shape.output_width;
        n = row / shape.output_height;
        h = row % shape.output_height * shape.stride_h - shape.pad_h;
        w = first_pixel % shape.output_width * shape.stride_w - shape.pad_w;
    }

    // Waits until the stage is free.
    __device__ __forceinline__ void load() {
        const u32 full = ring.full(ring.stage);
        ring.wait_empty();
        barrier_expect(full, STAGE_BYTES);
        tma_load_im2col(ring.address(), pixel_map, full, c, w, h, n, s, r);
        tma_load_2d(ring.address() + PIXEL_BYTES, weight_map, full, k, first_filter);
        ring.next();
        --left;
        k += SLAB;
        c += SLAB;
        if (c == channels) {
            c = 0;
            if (++s == filter_width) {
                s = 0;
                ++r;
            }
        }
    }
};

// A stage is released when the products after it have been issued, so that the tensor cores always have work.
__device__ __forceinline__ void multiply_slabs(Sums& sums, Stages& ring, Loader& loader, int slabs, int first_row) {
    int previous = 0;
    for (int slab = 0; slab < slabs; ++slab) {
        ring.wait_full();
        const u64 pixels = operand_descriptor(ring.address() + first_row * ROW_BYTES);
        const u64 weights = operand_descriptor(ring.address() + PIXEL_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < ROW_BYTES / 32; ++step)
#pragma unroll
            for (int i = 0; i < BLOCKS_M; ++i)
                multiply(sums[i], pixels + step * 2 + i * (64 * ROW_BYTES >> 4), weights + step * 2, slab || step);
        wgmma_commit();
        wgmma_wait<1>();
        if (slab > 0) {
            ring.release(previous);
            if (!PRODUCER) {
                if (threadIdx.x == 0 && loader.left > 0) loader.load();
                __syncwarp();
            }
        }
        previous = ring.stage;
        ring.next();
    }
    wgmma_wait<0>();
    // Nobody waits for the last stage any more.
}

// A lane has two neighbouring filters of rows lane / 4 and lane / 4 + 8 of its warp's 16, in every 8 filters; the
// four lanes of a row write 16 bytes together.
__device__ __forceinline__ void store(const Sums& sums, int warp_pixel, int first_filter, const ConvShape& shape,
                                      const Element* bias, const Element* residual, Element* y) {
    using Pair = Pack<Element, 2>;
    const int lane = threadIdx.x % 32;
    const int pixels = shape.batch * shape.output_height * shape.output_width;
    const int filter = first_filter + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int pixel = warp_pixel + i * 64 + half * 8 + lane / 4;
            if (pixel >= pixels) continue;
            const long long at = 1LL * pixel * shape.filters + filter;
#pragma unroll
            for (int j = 0; j < TILE_N / 8; ++j) {
                Pair biases = {}, residuals = {}, results;
                if (HAS_BIAS) biases = load_pack<Element, 2>(bias + filter + j * 8);
                if (HAS_RESIDUAL) residuals = load_pack<Element, 2>(residual + at + j * 8);
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    results.at[e] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(sums[i][j * 4 + half * 2 + e], biases.at,
                                                                             e, residuals.at, e);
                store_pack(y + at + j * 8, results);
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_hopper(const __grid_constant__ TensorMap pixel_map, const __grid_constant__ TensorMap weight_map,
                  const Element* __restrict__ bias, const Element* __restrict__ residual, Element* __restrict__ y,
                  ConvShape shape) {
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

    // Blocks that see the same pixels run side by side, so that x comes from DRAM once.
    const int tiles_n = shape.filters / TILE_N;
    const int first_pixel = blockIdx.x / tiles_n * TILE_M;
    const int first_filter = blockIdx.x % tiles_n * TILE_N;
    const int slabs = shape.filter_height * shape.filter_width * (shape.channels / SLAB);
    Loader loader(pixel_map, weight_map, ring, shape, first_pixel, first_filter, slabs);
    const int warpgroup = threadIdx.x / 128;
    if (PRODUCER && warpgroup == WARPGROUPS) {
        if constexpr (HANDS_OVER) release_registers<40>();
        if (threadIdx.x % 128 == 0)
            while (loader.left > 0) loader.load();
        return;
    }
    if constexpr (HANDS_OVER) claim_registers<232>();
    if (!PRODUCER) {
        if (threadIdx.x == 0)
            for (int stage = 0; stage < STAGES && loader.left > 0; ++stage) loader.load();
        __syncwarp();
    }
    Sums sums;
    const int first_row = warpgroup * BLOCKS_M * 64;
    multiply_slabs(sums, ring, loader, slabs, first_row);
    store(sums, first_pixel + first_row + threadIdx.x / 32 % 4 * 16, first_filter, shape, bias, residual, y);
}
