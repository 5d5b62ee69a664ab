// y[pixel][filter] = finish(sum over k of input[pixel][k] * weight[filter][k])      (conv2d/finish.cuh)
//
// The implicit GEMM with Hopper's own units, in NHWC, by blocks that stay: each takes tile after tile of output pixels
// and filters. The producer, one thread, starts copies (TMA) into a ring of stages, slabs of 128 bytes of channels of a
// filter tap, and runs ahead over the ends of tiles; the consumers, two warpgroups, do mainloop (wgmma) and epilogue.
//   SHARE     0: ping-pong: each warpgroup has tiles of its own, and the epilogue of one's tile lies under the mainloop
//             of the other's; 1: they share a tile, half of the pixels each; 2: half of the filters each;
//             3: every other slab each, and add up at the end
//   SWAPPED   filters are the rows of the product and pixels its columns: 64 filters then feed the tensor cores as well
//             as 256 do, for it is the operand with the columns that is read again for every 64 rows
//   BUFFERS   results go through so many panels of shared memory a warpgroup, by TMA (if PLACED or pooled, by
//             all threads),
//             and residuals come that way, under the mainloop; 0: straight from registers to y
//   CLUSTER   so many neighbouring blocks share each tile of weights: a part is copied by each, to all
//   SPLITS    so many blocks of a cluster share the sum of one tile, for problems of few tiles (conv2d/shared_sum.cuh);
//             PARTS_APART: parts come into shared memory of their own, else over the ring when all have done with it
//   PROMOTED  the sums of every slab are added up by ordinary additions: in FP8 tensor cores keep about 14 bits
//   PLACED    y is a part of a larger image: every so many pixels, every so many rows
//   POOL_H, POOL_W  y has the maxima of windows of so many pixels side by side, with PLACES where they are, a byte each:
//             those of a panel, whose 64 pixels are whole rows of windows, found by all threads
//   CLASSES   so many classes of pixels, each with taps and places of its own, have tiles in one launch
//             (conv2d/pixel_classes.cuh)
//   MN_MAJOR  weights lie as [k][filters], taps backwards: those of the convolution whose gradient this one is
// What bounds it: tensor cores and power; with 64 filters the copies from L2.
//
// Rung                 switches
//   persistent         BUFFERS 0
//   overlapped_store   BUFFERS 1 or 2
//   swapped_operands   SWAPPED, BUFFERS 2 or 4
//   cluster_multicast  CLUSTER 2, with BUFFERS, SWAPPED or not
//   cluster_split_k    SPLITS up to 8, SHARE 1 to 3, BUFFERS 0
// conv2d_input_gradient launches it too: `tma_wgmma` as a plain convolution, `persistent` with HAS_MASK, MN_MAJOR and
// PLACED, `one_launch` with CLASSES besides. Read sm90_persistent_tile.cuh (tiles, shared memory),
// sm90_persistent_copies.cuh (the producer), sm90_persistent_products.cuh (the mainloop), then the two epilogues:
// sm90_persistent_straight.cuh, sm90_persistent_panels.cuh.
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
                           Output* __restrict__ y, unsigned char* __restrict__ places, ConvShape shape,
                           ShortcutShape shortcut_shape, Placement placement,
                           const __grid_constant__ PixelClasses classes, int weights_ready, int release_dependents,
                           int y_pitch) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const u32 panels = shared_address(shared_memory);
    Stages ring(panels + 2 * BUFFERS * PANEL_BYTES);
    const u32 residual_barriers = ring.stages + Stages::BYTES;
    const u32 turn_barriers = residual_barriers + 2 * BUFFERS * 8;  // or those of parts
    const u32 received = PARTS_APART ? turn_barriers + 2 * 8 : ring.stages;
    const u32 rank = CLUSTER_BLOCKS > 1 ? cluster_rank() : 0;
    const auto parts_of = [&](int consumer) {
        const int own = DEPTH ? 0 : consumer;
        return Parts{received + own * Parts::BYTES, turn_barriers + own * 8, rank};
    };
    if (threadIdx.x == 0) {
        ring.init((PING_PONG || DEPTH ? 4 : 8) * CLUSTER);
        for (int buffer = 0; buffer < 2 * BUFFERS; ++buffer) barrier_init(residual_barriers + 8 * buffer, 1);
        for (int consumer = 0; PING_PONG && consumer < 2; ++consumer) barrier_init(turn_barriers + 8 * consumer, 4);
        for (int consumer = 0; PARTS > 1 && consumer < (DEPTH ? 1 : 2); ++consumer) parts_of(consumer).init();
        fence_barrier_init();
        fence_async_proxy();
        prefetch_map(pixel_map);
        prefetch_map(weight_map);
    }
    // Consumers wait for the barriers of the others; copies need not.
    if (SPLITS > 1 && PARTS_APART) cluster_arrive_relaxed();
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();  // the barriers of the others are ready too
    const Problem problem(shape, classes, shortcut_shape.channels);
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
        if (SPLITS > 1) {  // the barrier counts all threads
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
        PanelWriter<(BUFFERS > 0 ? BUFFERS : 1)> panel_writer{residual_map, output_map, finish, writer, consumer,
                                                              panels + consumer * BUFFERS * PANEL_BYTES,
                                                              residual_barriers + consumer * BUFFERS * 8, places};
        // Ping-pong: a warpgroup begins when the other has waited for all stages of the tile before. The first turn
        // is free: a barrier that nobody has arrived at passes for the parity before.
        u32 turn = consumer == 0;
        const auto slabs_of = [&](const Tile& tile) {
            const int slabs = problem.block_slabs(tile.pixel_class, rank);
            return DEPTH ? (slabs + 1 - consumer) / 2 : slabs;
        };
        if (consumer == 1 && (PING_PONG || DEPTH)) ring.skip(PING_PONG ? slabs_of(Tile(problem, first, rank)) : 1);
        for (int index = first + (PING_PONG ? consumer * step : 0); index < problem.tiles;
             index += (PING_PONG ? 2 : 1) * step) {
            const Tile tile(problem, index, rank);
            const int pixel = tile.pixel + wg_pixel, filter = tile.filter + wg_filter;
            if constexpr (CLASSES > 1) {
                tile_placement.offset_h = classes.of[tile.pixel_class].offset_h;
                tile_placement.offset_w = classes.of[tile.pixel_class].offset_w;
            }
            const int slabs = slabs_of(tile);
            int skipped = 0;  // of the other's tile, asked for while registers are free
            if (PING_PONG && index + step < problem.tiles) skipped = slabs_of(Tile(problem, index + step, rank));
            if (BUFFERS > 0) panel_writer.begin(pixel, filter);
            if (PING_PONG) barrier_wait(turn_barriers + 8 * consumer, turn);
            turn ^= 1;
            Sums sums;
            if constexpr (PROMOTED) multiply_promoted(sums, ring, slabs, wg_pixel, wg_filter);
            else multiply_slabs(sums, ring, slabs, wg_pixel, wg_filter);
            if (PING_PONG) {
                if (threadIdx.x % 32 == 0) barrier_arrive(turn_barriers + 8 * (1 - consumer));
                wgmma_wait<0>();
                release(ring, (ring.stage + STAGES - 1) % STAGES);
                ring.skip(skipped);
            }
            const int warp_pixel = pixel + threadIdx.x / 32 % 4 * 16;
            if constexpr (BUFFERS > 0) panel_writer.write(sums, pixel, filter);
            else if constexpr (PARTS > 1) writer.store_shared_sum(sums, parts_of(consumer), warp_pixel, filter);
            else writer.store(sums, warp_pixel, filter);
        }
        if (BUFFERS > 0) panel_writer.end();
    }
    if (CLUSTER > 1) cluster_sync();  // nobody leaves while another may reach into its shared memory
}
