// Epilogue of a persistent CTA through staging tiles in smem, by TMA. Residuals are loaded into them first.
#pragma once

#include "common/largest_pair.cuh"
#include "conv2d/sm90_persistent_moments.cuh"
#include "conv2d/sm90_persistent_straight.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int POOL_H = 1;       // pool[0]
constexpr int POOL_W = 1;       // pool[1]
constexpr bool PLACES = false;  // places: write argmax indices
#endif

constexpr int WINDOW = POOL_H * POOL_W;
constexpr bool POOLED = WINDOW > 1;
constexpr bool BY_THREADS = PLACED || POOLED;  // threads, not TMA, store the staging tiles
static_assert(64 % WINDOW == 0 && !(PLACED && POOLED) && (BUFFERS > 0 || !POOLED),
              "a staging tile holds whole windows");

// Address of a result in a staging tile, which may already hold the residual: byte `filter` * sizeof(Output) of row
// `pixel`, 16-byte chunks swizzled as TMA expects.
__device__ __forceinline__ u32 staging_address(u32 staging, int pixel, int filter) {
    const int byte = filter % BOX_FILTERS * sizeof(Output);
    return staging + filter / BOX_FILTERS * BOX_BYTES + pixel * ROW_BYTES + ((byte / 16 ^ pixel % 8) * 16) + byte % 16;
}

// 16-bit results: two blocks of 8 columns at a time by stmatrix, transposed if columns are pixels.
template <class Half>
__device__ __forceinline__ void write_matrices(const Sum* acc, u32 staging, const Finish& finish, int first_filter) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8;
#pragma unroll
    for (int block = 0; block < 8; block += 2) {
        const int pixel = SWAPPED ? 8 * (block + matrix / 2) + lane % 8 : 16 * warp + 8 * (matrix % 2) + lane % 8;
        const int chunk = SWAPPED ? 2 * warp + matrix % 2 : block + matrix / 2;
        const u32 address = staging_address(staging, pixel, chunk * 8);
        u32 packed[4];
        if (HAS_AUX) {
            if (SWAPPED) load_matrices_transposed(packed, address);
            else load_matrices(packed, address);
        }
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // part % 2: rows 8 to 15 of the warp's 16; part / 2: second block
            const Sum* pair = acc + 4 * (block + part / 2) + 2 * (part % 2);
            const int low = SWAPPED ? 16 * warp + 8 * (part % 2) + lane / 4 : 8 * (block + part / 2) + 2 * (lane % 4);
            const FilterPair filters = SWAPPED ? finish.twice(first_filter + low) : finish.of(first_filter + low);
            packed[part] = finish.packed<Half>(pair[0], pair[1], filters, packed[part]);
        }
        if (SWAPPED) store_matrices_transposed(address, packed);
        else store_matrices(address, packed);
    }
}

// 32-bit results, stored one by one: the lanes of a warp cover all banks.
__device__ __forceinline__ void write_words(const Sum* acc, u32 staging, const Finish& finish, int first_filter) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int block = 0; block < 8; ++block)
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int row = 16 * warp + 8 * (part / 2) + lane / 4, column = 8 * block + 2 * (lane % 4) + part % 2;
            const int pixel = SWAPPED ? column : row, filter = SWAPPED ? row : column;
            const u32 address = staging_address(staging, pixel, filter);
            const float residual = HAS_AUX ? load_shared(address) : 0.f;
            store_shared(address, finish.value(acc[4 * block + part], first_filter + filter, residual));
        }
}

template <int BUFFERS>
struct StagedWriter {
    const TensorMap &residual_map, &output_map;
    const Finish& finish;
    const Writer& writer;
    const int consumer;
    const u32 staging_tiles, barriers;           // of this warpgroup
    unsigned char* const indices;                // argmax of each pooling window
    const bool copier = threadIdx.x % 128 == 0;  // issues this warpgroup's TMA copies
    u32 residual_parity = 0;
    FilterMoments moments{};
    GradientSums gradient_sums;

    struct Origin {
        int pixel, filter;
    };
    __device__ __forceinline__ static Origin origin(int first_pixel, int first_filter, int number) {
        const int rows = number / STAGING_TILES_PER_ATOM * 64, columns = number % STAGING_TILES_PER_ATOM * 64;
        return {first_pixel + (SWAPPED ? columns : rows), first_filter + (SWAPPED ? rows : columns)};
    }

    __device__ __forceinline__ void fetch_residual(int first_pixel, int first_filter, int number) {
        const int buffer = number % BUFFERS;
        const Origin at = origin(first_pixel, first_filter, number);
        tma_store_wait_read<0>();
        barrier_expect(barriers + 8 * buffer, STAGING_BYTES);
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            const u32 to = staging_tiles + buffer * STAGING_BYTES + box * BOX_BYTES, full = barriers + 8 * buffer;
            const int filter = at.filter + box * BOX_FILTERS;
            if constexpr (PLACED) {
                const Placement& placement = writer.placement;
                const ImagePosition here = position_in_image(at.pixel, writer.shape, placement);
                // The map that covers all phases starts at the first pixel of all.
                const int down = CLASSES > 1 ? placement.offset_h : 0, across = CLASSES > 1 ? placement.offset_w : 0;
                tma_load_im2col(to, residual_map, full, filter, here.w - across, here.h - down, here.n, across, down);
            } else {
                tma_load_2d(to, residual_map, full, filter, at.pixel);
            }
        }
    }

    // Stores the rows of a staging tile to their placed positions, 16 bytes per thread, so that whole cache lines are
    // written.
    __device__ __forceinline__ void store_placed(u32 staging, const Origin& at) const {
        constexpr int CHUNK = 16 / sizeof(Output), CHUNKS = 64 / CHUNK, AT_ONCE = 128 / CHUNKS;
        const int filter = threadIdx.x % CHUNKS * CHUNK, first = threadIdx.x % 128 / CHUNKS;
        if (!FILTERS_ALIGNED && at.filter + filter >= writer.shape.filters) return;
#pragma unroll 4  // bounds the offsets held in registers
        for (int row = first; row < first + 64; row += AT_ONCE) {
            const int pixel = writer.stored(at.pixel + row);
            if (!writer.exists(at.pixel + row, pixel)) continue;
            Output* to = writer.y + writer.offset(pixel) + at.filter + filter;
            *reinterpret_cast<float4*>(to) = load_shared_16(staging_address(staging, row, filter));
        }
    }

    // Max over the windows of a staging tile, 16 bytes per thread, and their argmax. A staging tile holds whole rows of
    // windows. A template because packs of e4m3 have no elements.
    template <class Stored>
    __device__ __forceinline__ void store_pooled(u32 staging, const Origin& at) const {
        constexpr int CHUNK = 16 / sizeof(Stored), CHUNKS = 64 / CHUNK, AT_ONCE = 128 / CHUNKS;
        const int filter = threadIdx.x % CHUNKS * CHUNK, first = threadIdx.x % 128 / CHUNKS;
        const int width = writer.shape.output_width, across = width / POOL_W;
        if (!FILTERS_ALIGNED && at.filter + filter >= writer.shape.filters) return;
#pragma unroll 1
        for (int window = first; window < 64 / WINDOW; window += AT_ONCE) {
            if (at.pixel + window * WINDOW >= writer.pixels) return;
            const int corner = window / across * POOL_H * width + window % across * POOL_W;
            PlacedMaxima<Stored, CHUNK> largest;
#pragma unroll
            for (int index = 0; index < WINDOW; ++index) {
                const int pixel = corner + index / POOL_W * width + index % POOL_W;
                const float4 seen = load_shared_16(staging_address(staging, pixel, filter));
                if (index == 0) largest.begin(reinterpret_cast<const Pack<Stored, CHUNK>&>(seen), index);
                else largest.update(reinterpret_cast<const Pack<Stored, CHUNK>&>(seen), index);
            }
            const int pooled = at.pixel / WINDOW + window;
            largest.store(writer.y + writer.offset(pooled) + at.filter + filter);
            if (PLACES)
                largest.template store_indices<HAS_RELU>(indices + 1LL * pooled * writer.shape.filters + at.filter +
                                                         filter);
        }
    }

    // Call before the mainloop: residuals arrive during it.
    __device__ __forceinline__ void begin(int first_pixel, int first_filter) {
        if (HAS_AUX && copier)
            for (int number = 0; number < BUFFERS; ++number) fetch_residual(first_pixel, first_filter, number);
    }

    __device__ __forceinline__ void write(const Accumulators& acc, int first_pixel, int first_filter) {
#pragma unroll
        for (int number = 0; number < STAGING_TILES; ++number) {
            const int buffer = number % BUFFERS;
            const u32 here = staging_tiles + buffer * STAGING_BYTES;
            const Origin at = origin(first_pixel, first_filter, number);
            const GradientSums::Place place{at.pixel, writer.pixels - at.pixel, at.filter, writer.shape.filters};
            GradientSums::Loaded loaded;
            if constexpr (HAS_NORM) loaded = gradient_sums.load(place, 0);
            if (HAS_AUX) {
                barrier_wait(barriers + 8 * buffer, residual_parity);
                if (buffer == BUFFERS - 1) residual_parity ^= 1;
            } else {
                if (!BY_THREADS && copier) tma_store_wait_read<BUFFERS - 1>();
                warpgroup_sync(consumer);
            }
            const Sum* part = &acc[number / STAGING_TILES_PER_ATOM][number % STAGING_TILES_PER_ATOM * 32];
            if constexpr (sizeof(Output) == 2) write_matrices<Output>(part, here, finish, at.filter);
            else write_words(part, here, finish, at.filter);
            if constexpr (BY_THREADS) {
                warpgroup_sync(consumer);
                if constexpr (POOLED) store_pooled<Output>(here, at);
                else store_placed(here, at);
            }
            if constexpr (HAS_NORM) {
                warpgroup_sync(consumer);
                gradient_sums.add<Output>(SWAPPED ? number / STAGING_TILES_PER_ATOM : number % STAGING_TILES_PER_ATOM,
                                          place, loaded, [&](int pixel, int filter) { return staging_address(here, pixel, filter); });
            }
            if (!BY_THREADS || HAS_AUX) {  // an async-proxy copy follows
                fence_async_proxy();
                warpgroup_sync(consumer);
            }
            if (copier) {
#pragma unroll
                for (int box = 0; box < (BY_THREADS ? 0 : BOXES); ++box)
                    tma_store_2d(output_map, here + box * BOX_BYTES, at.filter + box * BOX_FILTERS, at.pixel);
                if (HAS_AUX && number + BUFFERS < STAGING_TILES)
                    fetch_residual(first_pixel, first_filter, number + BUFFERS);
            }
            if constexpr (STATISTICS) add_moments<Output>(here, at, number);
        }
        if (STATISTICS) moments.count += max(0, min(WG_PIXELS, writer.pixels - first_pixel));
    }

    // The copies above only read the staging tile, too, and it is overwritten behind a barrier of the warpgroup.
    template <class Stored>
    __device__ __forceinline__ void add_moments(u32 staging, const Origin& at, int number) {
        const int atom = number / STAGING_TILES_PER_ATOM, column = number % STAGING_TILES_PER_ATOM;
        const bool first = moments.count == 0 && (SWAPPED ? column : atom) == 0;
        moments.add<Stored>(SWAPPED ? atom : column, writer.pixels - at.pixel, first,
                            [&](int pixel, int filter) { return staging_address(staging, pixel, filter); });
    }

    // Staging tiles must have been read before the CTA exits.
    __device__ __forceinline__ void end() {
        if (copier) tma_store_wait_read<0>();
    }
};
