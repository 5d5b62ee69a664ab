// y[pixel][filter] = finish(sum over k of input[pixel][k] * weight[filter][k])      (conv2d/finish.cuh)
//
// Implicit GEMM on Hopper, NHWC: persistent CTAs loop over output tiles of pixels by filters. One producer thread
// issues TMA loads into a ring of stages and runs ahead across tile boundaries; a k-tile is 128 bytes of channels of
// one filter tap. Two consumer warpgroups run the wgmma mainloop and the epilogue.
//   SHARE     0: ping-pong, each warpgroup has its own tiles, one's epilogue overlaps the other's mainloop; 1: they
//             split the pixels of a tile; 2: they split its filters; 3: they take alternate k-tiles and add up at the
//             end
//   SWAPPED   filters are the rows of the MMA, pixels its columns: then 64 filters feed the tensor cores as well as
//             256, because the column operand is what is re-read for every 64 rows
//   BUFFERS   staging tiles per warpgroup: results leave through smem by TMA (by all threads if PLACED or pooled), and
//             residuals arrive there during the mainloop; 0: directly from registers to y
//   CLUSTER   CTAs that share each weight tile by multicast; each loads a part
//   SPLITS    CTAs of a cluster that split the k-tiles of one output tile, for problems of few tiles
//             (conv2d/shared_sum.cuh); PARTS_APART: the exchange has its own smem, else it reuses the ring
//   PROMOTED  add the accumulators of PROMOTE k-tiles up in fp32 registers: FP8 tensor cores keep only about 14 bits
//   PLACED    y is a strided subset of a larger image (conv2d/placement.cuh)
//   POOL_H, POOL_W  y is the max over disjoint POOL_H x POOL_W windows, with PLACES also their argmax, one byte each;
//                   the 64 pixels of a staging tile are whole rows of windows
//   CLASSES   sub-pixel phases computed by one launch (conv2d/pixel_classes.cuh)
//   STATISTICS  also write each filter's mean and squared deviations over the pixels of each warpgroup
//             (conv2d/sm90_persistent_moments.cuh); every CTA then has tiles of the same filters
//   NORM      y is the gradient of a batch normalization's result: also write the sums for its own gradients
//   PERMUTED  8-bit x: the filters of a tile are loaded in an order in which lanes hold 16 adjacent ones
//   VOLUMES   x are volumes: the images are those of all volumes, the rows of taps those of all frames of the filter
//   MN_MAJOR  weights are [k][filters] with the taps reversed: those of the convolution this one is the gradient of
// Limiter: tensor cores and power; with 64 filters, loads from L2.
//
// Rung                 switches
//   persistent         BUFFERS 0
//   overlapped_store   BUFFERS 1 or 2
//   swapped_operands   SWAPPED, BUFFERS 2 or 4
//   cluster_multicast  CLUSTER 2, with BUFFERS, SWAPPED or not
//   cluster_split_k    SPLITS up to 8, SHARE 1 to 3, BUFFERS 0
// conv2d_input_gradient: `tma_wgmma` as a plain convolution, `persistent` with HAS_MASK, MN_MAJOR and PLACED,
// `one_launch` also with CLASSES.
// Read sm90_persistent_tile.cuh (tiles, smem), sm90_persistent_copies.cuh (producer), sm90_persistent_products.cuh
// (mainloop), then the epilogues: sm90_persistent_straight.cuh, sm90_persistent_panels.cuh.
#include "conv2d/sm90_persistent_copies.cuh"
#include "conv2d/sm90_persistent_panels.cuh"
#include "conv2d/sm90_persistent_products.cuh"
#include "conv2d/sm90_persistent_straight.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_sm90_persistent(const __grid_constant__ TensorMap pixel_map, const __grid_constant__ TensorMap weight_map,
                           const __grid_constant__ TensorMap shortcut_map,
                           const __grid_constant__ TensorMap shortcut_weight_map,
                           const __grid_constant__ TensorMap residual_map, const __grid_constant__ TensorMap output_map,
                           const Bias* __restrict__ bias, const float* __restrict__ scale,
                           const float* __restrict__ scales, const Element* __restrict__ residual,
                           Output* __restrict__ y, unsigned char* __restrict__ indices, ConvShape shape,
                           ShortcutShape shortcut_shape, Placement placement, const __grid_constant__ Phases phases,
                           int weights_ready, int release_dependents, int y_pitch, float* __restrict__ partial,
                           const __grid_constant__ Normalization norm) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const u32 staging_tiles = shared_address(shared_memory);
    Stages ring(staging_tiles + 2 * BUFFERS * STAGING_BYTES);
    const u32 residual_barriers = ring.stages + Stages::BYTES;
    const u32 turn_barriers = residual_barriers + 2 * BUFFERS * 8;  // with SPLITS: those of the exchange
    const u32 received = PARTS_APART ? turn_barriers + 2 * 8 : ring.stages;
    const u32 rank = CLUSTER_BLOCKS > 1 ? cluster_rank() : 0;
    const auto exchange_of = [&](int consumer) {
        const int own = DEPTH ? 0 : consumer;
        return Parts{received + own * Parts::BYTES, turn_barriers + own * 8, rank};
    };
    if (threadIdx.x == 0) {
        ring.init((PING_PONG || DEPTH ? 4 : 8) * CLUSTER);
        for (int buffer = 0; buffer < 2 * BUFFERS; ++buffer) barrier_init(residual_barriers + 8 * buffer, 1);
        for (int consumer = 0; PING_PONG && consumer < 2; ++consumer) barrier_init(turn_barriers + 8 * consumer, 4);
        for (int consumer = 0; PARTS > 1 && consumer < (DEPTH ? 1 : 2); ++consumer) exchange_of(consumer).init();
        fence_barrier_init();
        fence_async_proxy();
        prefetch_map(pixel_map);
        prefetch_map(weight_map);
    }
    // Only consumers access the other CTAs' barriers, so only they wait; the producer starts at once.
    if (SPLITS > 1 && PARTS_APART) cluster_arrive_relaxed();
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();  // the other CTAs' barriers are initialized too
    const Problem problem(shape, phases, shortcut_shape.channels);
    const int first = blockIdx.x / CLUSTER_BLOCKS, step = gridDim.x / CLUSTER_BLOCKS;
    if (threadIdx.x < 128) {
        release_registers<40>();
        if (threadIdx.x == 0) {
            const Maps maps{pixel_map, weight_map, shortcut_map, shortcut_weight_map};
            const Copier copier{problem, maps, shortcut_shape.stride, rank};
            const int ahead = weights_ready ? copier.copy_ahead(ring, first) : 0;
            wait_for_previous_launch();
            copier.copy_tiles(ring, first, step, ahead);
            if (release_dependents) let_next_launch_start();
        }
        if (SPLITS > 1) {  // the cluster barrier counts all threads
            if (!PARTS_APART) cluster_arrive();
            cluster_wait();
        }
    } else {
        claim_registers<232>();
        if (SPLITS > 1 && PARTS_APART) cluster_wait();
        wait_for_previous_launch();
        const int consumer = threadIdx.x / 128 - 1;
        const int wg_pixel = SHARE == 1 ? consumer * WG_PIXELS : 0, wg_filter = SHARE == 2 ? consumer * WG_FILTERS : 0;
        const Finish finish{bias, scale, scales, residual, shape.filters};
        Placement tile_placement = placement;
        const Writer writer{finish, y, shape, tile_placement, problem.pixels, y_pitch};
        StagedWriter<(BUFFERS > 0 ? BUFFERS : 1)> staged_writer{residual_map,
                                                                output_map,
                                                                finish,
                                                                writer,
                                                                consumer,
                                                                staging_tiles + consumer * BUFFERS * STAGING_BYTES,
                                                                residual_barriers + consumer * BUFFERS * 8,
                                                                indices,
                                                                threadIdx.x % 128 == 0,
                                                                0,
                                                                {},
                                                                GradientSums(norm)};
        // Ping-pong: a warpgroup begins once the other has waited for all stages of the previous tile. The first turn
        // is free: waiting on the previous parity of a fresh barrier returns at once.
        u32 turn = consumer == 0;
        const auto k_tiles_of = [&](const Tile& tile) {
            const int k_tiles = problem.cta_k_tiles(tile.phase, rank);
            return DEPTH ? (k_tiles + 1 - consumer) / 2 : k_tiles;
        };
        const auto prefetch = [&](int index) {
            if (!(HAS_NORM || (PERMUTED && HAS_RESIDUAL)) || index >= problem.tiles) return;
            const Tile tile(problem, index, rank);
            const int pixel = tile.pixel + wg_pixel, filter = tile.filter + wg_filter;
            if (PERMUTED && HAS_RESIDUAL) writer.prefetch(residual, pixel, filter);
            if (HAS_NORM) writer.prefetch(norm.x, pixel, filter);
            if (MASK_BY_OUTPUT) writer.prefetch(norm.output, pixel, filter);
        };
        const int own_step = (PING_PONG ? 2 : 1) * step;
        prefetch(first + (PING_PONG ? consumer * step : 0));
        if (consumer == 1 && (PING_PONG || DEPTH)) ring.skip(PING_PONG ? k_tiles_of(Tile(problem, first, rank)) : 1);
        for (int index = first + (PING_PONG ? consumer * step : 0); index < problem.tiles;
             index += own_step) {
            prefetch(index + own_step);
            const Tile tile(problem, index, rank);
            const int pixel = tile.pixel + wg_pixel, filter = tile.filter + wg_filter;
            if constexpr (CLASSES > 1) {
                tile_placement.offset_h = phases.of[tile.phase].offset_h;
                tile_placement.offset_w = phases.of[tile.phase].offset_w;
            }
            const int k_tiles = k_tiles_of(tile);
            int skipped = 0;  // k-tiles of the other warpgroup's tile; computed here, where registers are free
            if (PING_PONG && index + step < problem.tiles) skipped = k_tiles_of(Tile(problem, index + step, rank));
            Lines lines;
            if (BUFFERS > 0) staged_writer.begin(pixel, filter);
            if constexpr (PERMUTED && HAS_RESIDUAL)
                writer.load(lines, 0, pixel + threadIdx.x / 32 % 4 * 16, filter);
            if (PING_PONG) barrier_wait(turn_barriers + 8 * consumer, turn);
            turn ^= 1;
            Accumulators acc;
            if constexpr (PROMOTED) multiply_promoted(acc, ring, k_tiles, wg_pixel, wg_filter);
            else multiply_k_tiles(acc, ring, k_tiles, wg_pixel, wg_filter);
            if (PING_PONG) {
                if (threadIdx.x % 32 == 0) barrier_arrive(turn_barriers + 8 * (1 - consumer));
                wgmma_wait<0>();
                release(ring, (ring.stage + STAGES - 1) % STAGES);
                ring.skip(skipped);
            }
            const int warp_pixel = pixel + threadIdx.x / 32 % 4 * 16;
            if constexpr (BUFFERS > 0) staged_writer.write(acc, pixel, filter);
            else if constexpr (PARTS > 1) writer.store_shared_sum(acc, exchange_of(consumer), warp_pixel, filter);
            else writer.store(acc, lines, warp_pixel, filter);
        }
        if (BUFFERS > 0) staged_writer.end();
        if constexpr (HAS_SUMS) {
            // The tiles of a CTA are `sharing` apart in pixels, and those of its warpgroups follow each other.
            const int sharing = gridDim.x / problem.tiles_n, own = first / problem.tiles_n;
            const int split = SHARE == 2 ? own : PING_PONG ? own + consumer * sharing : 2 * own + consumer;
            const PartialSums to{partial, split, (SHARE == 2 ? 1 : 2) * sharing,
                                 Tile(problem, first, rank).filter + wg_filter, shape.filters};
            if constexpr (STATISTICS) staged_writer.moments.store(to);
            else staged_writer.gradient_sums.store(to);
        }
    }
    if (CLUSTER > 1) cluster_sync();  // no CTA exits while another may access its smem
}
