// y[n][h][w][k] = relu(sum over r, s, c of x[n][h + r * DILATION_H - pad_h][w + s * DILATION_W - pad_w][c]
//                                          * weight[k][r][s][c]
//                      + bias[k] + residual[n][h][w][k])
//
// 64 channels (of 8 bits, 64 or 128), stride 1, NHWC. The implicit GEMM loads a pixel once per tap that covers it, and with 64 channels those
// loads are its limit. Here one TMA load brings the window of a whole tile, padding included, and all taps read it in
// place (conv2d/window_tile.cuh).
// Persistent CTAs keep all taps of their 64 filters in smem. One thread copies windows into a ring of STAGES; two
// warpgroups ping-pong over tiles, so one's epilogue overlaps the other's MMAs.
// Limiter: tensor cores, 64 x WGMMA_N x 16 per step, and power.
//
// Rung: `window`. conv2d_input_gradient launches it with HAS_MASK and MN_MAJOR. Read window_tile.cuh (tile and window),
// then products.cuh.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int STAGES = 4;  // config.stages: window stages
#endif

#include "common/ring.cuh"
#include "conv2d/window_tile.cuh"  // defines the wgmma widths its users need
#include "conv2d/products.cuh"

static_assert(K_TILE == 64 || sizeof(Element) == 1, "64 channels of 16 bits, or 64 or 128 of 8");
constexpr MNMajor WEIGHTS = MN_MAJOR ? MNMajor::rows : MNMajor::none;
constexpr int WEIGHT_BYTES = FILTER_HEIGHT * FILTER_WIDTH * TAP_BYTES;

using Windows = Ring<STAGES, WINDOW_STAGE_BYTES>;

struct Memory {   // smem addresses
    u32 weights;  // by tap
    u32 staging_tiles;  // one per consumer
    Windows windows;
    u32 weights_full;   // barriers: one per filter row
    u32 residual_full;  // one per consumer
    u32 turns;          // one per consumer

    __device__ __forceinline__ explicit Memory(u32 start)
        : weights(start), staging_tiles(weights + WEIGHT_BYTES), windows(staging_tiles + CONSUMERS * STAGING_BYTES),
          weights_full(windows.stages + Windows::BYTES), residual_full(weights_full + FILTER_HEIGHT * 8),
          turns(residual_full + CONSUMERS * 8) {}

    __device__ __forceinline__ void init_barriers() const {
        windows.init(4);  // warps of the one consumer that owns the tile
        for (int r = 0; r < FILTER_HEIGHT; ++r) barrier_init(weights_full + r * 8, 1);
        StagingTile::init(residual_full);
        PingPong::init(turns);
    }
};

// The tiles of a CTA. CTAs with the same tiles and other filters are adjacent, so x is read from DRAM once.
struct Work {
    const int filter, first, step;

    __device__ __forceinline__ explicit Work(const WindowShape& shape)
        : filter(blockIdx.x % shape.filter_tiles * FILTERS), first(blockIdx.x / shape.filter_tiles),
          step(gridDim.x / shape.filter_tiles) {}
};

// ------------------------------------------------------------------ producer, one thread

__device__ __forceinline__ void copy_weights(const TensorMap& map, const Memory& memory, int filter) {
    for (int r = 0; r < FILTER_HEIGHT; ++r) {
        const u32 full = memory.weights_full + r * 8;
        barrier_expect(full, FILTER_WIDTH * TAP_BYTES);
        for (int s = 0; s < FILTER_WIDTH; ++s) {
            const int tap = r * FILTER_WIDTH + s;
            load_weights(memory.weights + tap * TAP_BYTES, map, full, 0, tap, filter);
        }
    }
}

// Weights that are ready need not wait for the previous launch (PDL). Otherwise the first window is loaded before them:
// MMAs begin once it and one filter row have arrived.
__device__ __forceinline__ void copy_windows(const TensorMap& window_map, const TensorMap& weight_map,
                                             const WindowShape& shape, const Memory& memory, const Work& work,
                                             bool weights_ready) {
    if (weights_ready) copy_weights(weight_map, memory, work.filter);
    wait_for_previous_launch();
    Windows ring = memory.windows;
    for (int index = work.first; index < shape.tiles; index += work.step, ring.next()) {
        ring.wait_empty();
        load_window(ring.address(), window_map, ring.full(ring.stage), shape, Tile(shape, index, work.filter), 0);
        if (index == work.first && !weights_ready) copy_weights(weight_map, memory, work.filter);
    }
}

// ------------------------------------------------------------------ mainloop, two warpgroups

__device__ __forceinline__ void multiply_window(Accumulators& acc, const Memory& memory, u32 window) {
    // Not unrolled: 36 MMAs with WGMMA_N / 2 operands each take most of the compile time.
#pragma unroll 1
    for (int r = 0; r < FILTER_HEIGHT; ++r) {
        barrier_wait(memory.weights_full + r * 8, 0);  // returns at once after the first tile
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < FILTER_WIDTH; ++s) {
            const u32 tap = memory.weights + (r * FILTER_WIDTH + s) * TAP_BYTES;
            const u32 shifted = window + (r * DILATION_H * WINDOW_WIDTH + s * DILATION_W) * ROW_BYTES;
            const u64 weights = ROW_BYTES == 64 ? narrow_operand_descriptor(tap) : k_tile_descriptor<MN_MAJOR>(tap);
            const u64 pixels = ROW_BYTES == 64 ? narrow_operand_descriptor(shifted) : operand_descriptor(shifted);
#pragma unroll
            for (int k = 0; k < ROW_BYTES / 32; ++k)
                multiply<Element, WEIGHTS>(acc, weights + k * STEP<MN_MAJOR>, pixels + k * STEP<false>, r || s || k);
        }
    }
    wgmma_commit();
}

__device__ __forceinline__ void multiply_tiles(StagingTile& staging, const Biases& biases, const Memory& memory,
                                               const Work& work) {
    const WindowShape& shape = staging.shape;
    PingPong ping_pong(memory.turns, staging.consumer);
    Windows ring = memory.windows;
    ring.skip(staging.consumer);
    for (int index = work.first + staging.consumer * work.step; index < shape.tiles;
         index += CONSUMERS * work.step, ring.skip(CONSUMERS)) {
        const Tile tile(shape, index, work.filter);
        staging.begin(tile);
        ping_pong.wait();
        ring.wait_full();
        Accumulators acc;
        multiply_window(acc, memory, ring.address());
        ping_pong.pass();
        wgmma_wait<0>();
        ring.release(ring.stage);
        staging.store(acc, tile, biases);
    }
    staging.close();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_sm90_window(const __grid_constant__ TensorMap window_map, const __grid_constant__ TensorMap weight_map,
                       const __grid_constant__ TensorMap residual_map, const __grid_constant__ TensorMap output_map,
                       const Bias* __restrict__ bias, WindowShape shape, int weights_ready, int release_dependents,
                       const float* __restrict__ scale, const float* __restrict__ scales) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const Memory memory(shared_address(shared_memory));
    if (threadIdx.x == 0) {
        memory.init_barriers();
        fence_barrier_init();
        prefetch_map(window_map);
        prefetch_map(weight_map);
        prefetch_map(output_map);
    }
    clear_gaps<STAGES>(memory.windows.stages, memory.staging_tiles);
    __syncthreads();

    const Work work(shape);
    const int consumer = threadIdx.x / 128;
    if (consumer == CONSUMERS) {
        release_registers<40>();
        if (threadIdx.x % 128 == 0) {
            copy_windows(window_map, weight_map, shape, memory, work, weights_ready);
            if (release_dependents) let_next_launch_start();
        }
    } else {
        claim_registers<232>();
        wait_for_previous_launch();
        StagingTile staging(residual_map, output_map, shape, memory.staging_tiles, memory.residual_full, consumer);
        multiply_tiles(staging, Biases(bias, work.filter, scale, scales), memory, work);
    }
}
