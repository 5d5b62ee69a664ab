// y[pixel][filter] = finish(sum over k of input[pixel][k] * weight[filter][k])      (conv2d/finish.cuh)
//
// The implicit GEMM with Hopper's own units, in NHWC, by blocks that stay: each takes tile after tile of output pixels
// and filters. One thread starts copies into a ring of stages, slabs of 128 bytes of channels of one filter tap, and
// runs ahead over the ends of tiles; two warpgroups multiply (wgmma) and finish.
//   SHARE     0: each warpgroup has tiles of its own, and they take turns, so that the ends of one's tile lie under the
//             products of the other's; 1: they share a tile, half of the pixels each; 2: half of the filters each;
//             3: every other slab each, and add up at the end
//   SWAPPED   filters are the rows of the product and pixels its columns: 64 filters then feed the tensor cores as well
//             as 256 do, for it is the operand with the columns that is read again for every 64 rows
//   BUFFERS   results go through so many panels of shared memory a warpgroup, by the copy engine (if PLACED, by all
//             threads), and residuals come that way, under the products; 0: straight from registers to y
//   CLUSTER   so many neighbouring blocks share each tile of weights: a part is copied by each, to all
//   SPLITS    so many blocks of a cluster share the sum of one tile, for problems of few tiles
//   PROMOTED  the sums of every slab are added up by ordinary additions: in FP8 tensor cores keep about 14 bits
//   PLACED    y is a part of a larger image: every so many pixels, every so many rows
// What bounds it: tensor cores and power; with 64 filters the copies from L2.
#include "common/conv_shape.cuh"
#include "common/ring.cuh"
#include "common/warp.cuh"
#include "common/wgmma_widths.cuh"
#include "conv2d/finish.cuh"
#include "conv2d/placement.cuh"
#include "conv2d/products.cuh"

constexpr int ROW_BYTES = 128;  // what the swizzle spans
constexpr int SLAB = ROW_BYTES / sizeof(Element);
constexpr bool TURNS = SHARE == 0, DEPTH = SHARE == 3;
constexpr int TILE_PIXELS = WG_PIXELS * (SHARE == 1 ? 2 : 1);
constexpr int TILE_FILTERS = WG_FILTERS * (SHARE == 2 ? 2 : 1);
constexpr int PIXEL_BYTES = TILE_PIXELS * ROW_BYTES;
constexpr int STAGE_BYTES = PIXEL_BYTES + TILE_FILTERS * ROW_BYTES;
constexpr int WG_ROWS = SWAPPED ? WG_FILTERS : WG_PIXELS;
constexpr int COLUMNS = SWAPPED ? WG_PIXELS : WG_FILTERS;
constexpr int ATOMS = WG_ROWS / 64;  // blocks of 64 rows of a warpgroup
constexpr int CLUSTER_BLOCKS = CLUSTER * SPLITS;
constexpr int PARTS = SPLITS * (DEPTH ? 2 : 1);  // that a sum comes in
constexpr int THREADS = 384;

// Results move in panels of 64 pixels and 64 filters, as boxes of 128 bytes a pixel.
constexpr int BOX_BYTES = 64 * ROW_BYTES;
constexpr int BOX_FILTERS = ROW_BYTES / sizeof(Output);
constexpr int BOXES = sizeof(Output) / 2;
constexpr int PANEL_BYTES = BOXES * BOX_BYTES;
constexpr int PANELS_AN_ATOM = COLUMNS / 64;
constexpr int PANELS = ATOMS * PANELS_AN_ATOM;

static_assert(BUFFERS == 0 || (PANELS % BUFFERS == 0 && sizeof(Output) >= 2), "buffers are used in a fixed order");
static_assert(BUFFERS > 0 || !SWAPPED, "straight to y: pixels are rows");
static_assert(PARTS == 1 || (!TURNS && CLUSTER == 1 && BUFFERS == 0), "both warpgroups add up one tile");
static_assert(PARTS == 1 || ATOMS * COLUMNS / 2 * 256 * 4 <= STAGES * STAGE_BYTES, "partial sums lie over the ring");
static_assert(!PROMOTED || (!DEPTH && ATOMS * COLUMNS <= 128), "sums are held twice");
static_assert(!DEPTH || STAGES % 2 == 0, "every other stage is one warpgroup's");

using Stages = Ring<STAGES, STAGE_BYTES>;  // pixels, then weights
using Sums = float[ATOMS][COLUMNS / 2];

struct Maps {
    const TensorMap &pixels, &weights, &shortcut, &shortcut_weights;
};

struct Problem {
    ConvShape shape;
    int pixels, tiles_n, tiles, slabs, tap_slabs;

    __device__ __forceinline__ Problem(const ConvShape& shape, int shortcut_channels) : shape(shape) {
        pixels = shape.batch * shape.output_height * shape.output_width;
        tiles_n = (shape.filters + TILE_FILTERS - 1) / TILE_FILTERS;
        const int tiles_m = (pixels + TILE_PIXELS - 1) / TILE_PIXELS;
        tiles = (tiles_m + CLUSTER - 1) / CLUSTER * tiles_n;
        tap_slabs = (shape.channels + SLAB - 1) / SLAB;
        slabs = shape.filter_height * shape.filter_width * tap_slabs;
        if (SHORTCUT) slabs += (shortcut_channels + SLAB - 1) / SLAB;
    }

    __device__ __forceinline__ int first_slab(u32 rank) const { return SPLITS == 1 ? 0 : slabs * rank / SPLITS; }
    __device__ __forceinline__ int last_slab(u32 rank) const {
        return SPLITS == 1 ? slabs : slabs * (rank + 1) / SPLITS;
    }
};

struct Tile {
    int pixel, filter;

    // Tiles that see the same pixels follow each other, so that x comes from DRAM once. The blocks of a cluster have
    // neighbouring pixels; past the last there are zeros, and nothing is stored.
    __device__ __forceinline__ Tile(const Problem& problem, int index, u32 rank)
        : pixel((index / problem.tiles_n * CLUSTER + (CLUSTER > 1 ? rank : 0)) * TILE_PIXELS),
          filter(index % problem.tiles_n * TILE_FILTERS) {}
};

// ------------------------------------------------------------------ copies, by one thread

// Over the slabs of a sum: all channels of a tap, then the next tap, at last the shortcut's channels.
struct Walk {
    int tap, c, r, s;

    __device__ __forceinline__ Walk(const Problem& problem, int slab) {
        const ConvShape& shape = problem.shape;
        const int taps = shape.filter_height * shape.filter_width;
        tap = min(slab / problem.tap_slabs, taps);
        c = (slab - tap * problem.tap_slabs) * SLAB;
        r = tap / shape.filter_width;
        s = tap % shape.filter_width;
    }

    __device__ __forceinline__ bool in_shortcut(const ConvShape& shape) const {
        return SHORTCUT && r == shape.filter_height;
    }

    __device__ __forceinline__ void next(const ConvShape& shape) {
        c += SLAB;
        if (in_shortcut(shape) || c < shape.channels) return;
        c = 0;
        ++tap;
        if (++s == shape.filter_width) {
            s = 0;
            ++r;
        }
    }
};

struct Copier {
    const Problem& problem;
    const Maps& maps;
    const int shortcut_stride;
    const u32 rank;

    __device__ __forceinline__ void copy_weights(const Stages& ring, const Walk& walk, int filter) const {
        const bool shortcut = walk.in_shortcut(problem.shape);
        const TensorMap& map = shortcut ? maps.shortcut_weights : maps.weights;
        const u32 to = ring.address() + PIXEL_BYTES, full = ring.full(ring.stage);
        const int tap = shortcut ? 0 : walk.tap;
        if constexpr (CLUSTER > 1) {
            constexpr int PART = TILE_FILTERS / CLUSTER;
            tma_load_3d_multicast(to + rank * PART * ROW_BYTES, map, full, walk.c, tap, filter + rank * PART,
                                  (1 << CLUSTER) - 1);
        } else {
            tma_load_3d(to, map, full, walk.c, tap, filter);
        }
    }

    // The weights of the first stages, which have never been used; says how many.
    __device__ __forceinline__ int copy_ahead(Stages ring, int index) const {
        const int first_slab = problem.first_slab(rank), count = min(problem.last_slab(rank) - first_slab, STAGES);
        Walk walk(problem, first_slab);
        const Tile tile(problem, index, rank);
        for (int slab = 0; slab < count; ++slab, ring.next(), walk.next(problem.shape)) {
            barrier_expect(ring.full(ring.stage), STAGE_BYTES);
            copy_weights(ring, walk, tile.filter);
        }
        return count;
    }

    // Tile after tile; of the first `ahead` slabs the weights are on their way.
    __device__ __forceinline__ void copy_tiles(Stages ring, int first, int step, int ahead) const {
        const ConvShape& shape = problem.shape;
        const int first_slab = problem.first_slab(rank), last_slab = problem.last_slab(rank);
        for (int index = first; index < problem.tiles; index += step) {
            const Tile tile(problem, index, rank);
            const int row = tile.pixel / shape.output_width;
            const int n = row / shape.output_height;
            const int oh = row % shape.output_height, ow = tile.pixel % shape.output_width;
            const int h = oh * shape.stride_h - shape.pad_h, w = ow * shape.stride_w - shape.pad_w;
            Walk walk(problem, first_slab);
            for (int slab = first_slab; slab < last_slab; ++slab, ring.next(), walk.next(shape)) {
                const u32 full = ring.full(ring.stage);
                if (ahead > 0) {
                    --ahead;
                } else {
                    ring.wait_empty();
                    barrier_expect(full, STAGE_BYTES);
                    copy_weights(ring, walk, tile.filter);
                }
                if (walk.in_shortcut(shape))
                    tma_load_im2col(ring.address(), maps.shortcut, full, walk.c, ow * shortcut_stride,
                                    oh * shortcut_stride, n, 0, 0);
                else
                    tma_load_im2col(ring.address(), maps.pixels, full, walk.c, w, h, n, walk.s * shape.dilation_w,
                                    walk.r * shape.dilation_h);
            }
        }
    }
};

// ------------------------------------------------------------------ products, by two warpgroups

__device__ __forceinline__ void release(const Stages& ring, int stage) {
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x % 32 == 0)
            for (u32 rank = 0; rank < CLUSTER; ++rank) barrier_arrive_cluster(ring.empty(stage), rank);
    } else {
        ring.release(stage);
    }
}

__device__ __forceinline__ void multiply_slab(Sums& sums, const Stages& ring, int first_pixel, int first_filter,
                                              bool accumulate) {
    ring.wait_full();
    const u64 pixels = operand_descriptor(ring.address() + first_pixel * ROW_BYTES);
    const u64 weights = operand_descriptor(ring.address() + PIXEL_BYTES + first_filter * ROW_BYTES);
    const u64 rows = SWAPPED ? weights : pixels, columns = SWAPPED ? pixels : weights;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < ROW_BYTES / 32; ++step)
#pragma unroll
        for (int i = 0; i < ATOMS; ++i)
            multiply<Element>(sums[i], rows + step * 2 + i * (64 * ROW_BYTES >> 4), columns + step * 2,
                              accumulate || step);
    wgmma_commit();
}

// A stage is released when the products after it have been issued, so that the tensor cores always have work.
__device__ __forceinline__ void multiply_slabs(Sums& sums, Stages& ring, int slabs, int first_pixel, int first_filter) {
    int previous = 0;
    for (int slab = 0; slab < slabs; ++slab) {
        multiply_slab(sums, ring, first_pixel, first_filter, slab > 0);
        wgmma_wait<1>();
        if (slab > 0) release(ring, previous);
        previous = ring.stage;
        if (DEPTH) ring.skip(2);
        else ring.next();
    }
    if (!TURNS) {
        wgmma_wait<0>();
        release(ring, previous);
    }
}

__device__ __forceinline__ void add(Sums& sums, const Sums& part) {
#pragma unroll
    for (int i = 0; i < ATOMS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; ++j) sums[i][j] += part[i][j];
}

// The same with every slab's sums by themselves: while one warpgroup adds up, the other multiplies.
__device__ __forceinline__ void multiply_promoted(Sums& sums, Stages& ring, int slabs, int first_pixel,
                                                  int first_filter) {
#pragma unroll
    for (int i = 0; i < ATOMS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; ++j) sums[i][j] = 0.f;
    for (int slab = 0; slab < slabs; ++slab, ring.next()) {
        Sums part;
        multiply_slab(part, ring, first_pixel, first_filter, false);
        wgmma_wait<0>();
        if (!TURNS || slab + 1 < slabs) release(ring, ring.stage);
        add(sums, part);
    }
}

// ------------------------------------------------------------------ results straight to y

// A lane has two neighbouring filters of rows lane / 4 and lane / 4 + 8 of its warp's 16, in every 8 filters; the four
// lanes of a row write 8 elements together.
struct Writer {
    const Finish& finish;
    Output* y;
    const ConvShape& shape;
    const Placement& placement;
    int pixels;

    __device__ __forceinline__ long long offset(int pixel) const { return ::offset(pixel, shape, placement); }

    __device__ __forceinline__ void store(const Sums& sums, int warp_pixel, int first_filter) const {
        if constexpr (sizeof(Output) == 1 && FILTERS_ALIGNED && COLUMNS % 32 == 0) {
            store_bytes(sums, warp_pixel, first_filter);
            return;
        }
        const int lane = threadIdx.x % 32;
        long long at[ATOMS][2];
#pragma unroll
        for (int i = 0; i < ATOMS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) at[i][half] = offset(warp_pixel + i * 64 + half * 8 + lane / 4);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            const int filter = first_filter + j * 8 + lane % 4 * 2;
            const FilterPair pair = finish.of(filter);
#pragma unroll
            for (int i = 0; i < ATOMS; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (warp_pixel + i * 64 + half * 8 + lane / 4 < pixels)
                        finish.store_pair(sums[i][j * 4 + half * 2], sums[i][j * 4 + half * 2 + 1], pair, filter,
                                          at[i][half], y);
        }
    }

    // Results of one byte: four lanes exchange what they have of 32 filters, so that each has 8 neighbours to store.
    __device__ __forceinline__ void store_bytes(const Sums& sums, int warp_pixel, int first_filter) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j += 4) {
            FilterPair pairs[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) pairs[b] = finish.of(first_filter + (j + b) * 8 + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < ATOMS; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int pixel = warp_pixel + i * 64 + half * 8 + lane / 4;
                    const long long at = offset(pixel) + first_filter + j * 8;
                    u32 codes[4] = {};
#pragma unroll
                    for (int b = 0; b < 4; ++b) {
                        if (pixel >= pixels) continue;
                        const float* two = &sums[i][(j + b) * 4 + half * 2];
                        const float2 results = finish.both(two[0], two[1], pairs[b], at + b * 8 + lane % 4 * 2);
                        codes[b] = to_e4m3x2(results.x, results.y);
                    }
                    const uint2 eight = exchanged(codes);
                    if (pixel < pixels) *reinterpret_cast<uint2*>(y + at + lane % 4 * 8) = eight;
                }
        }
    }

    // Of four lanes that each have a 16-bit part of four rows: row lane % 4, its parts in the order of the lanes.
    __device__ __forceinline__ static uint2 exchanged(const u32 (&parts)[4]) {
        const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
        const u32 low = parts[0] | parts[1] << 16, high = parts[2] | parts[3] << 16;
        const u32 kept = upper ? high : low, got = __shfl_xor_sync(ALL_LANES, upper ? low : high, 2);
        const u32 near = upper ? got : kept, far = upper ? kept : got;  // of lanes 0 or 1, and of 2 or 3
        const u32 firsts = (near & 0xFFFF) | far << 16, seconds = near >> 16 | (far & 0xFFFF0000);
        const u32 other = __shfl_xor_sync(ALL_LANES, odd ? firsts : seconds, 1);
        const u32 even_lanes = odd ? other : firsts, odd_lanes = odd ? seconds : other;
        return make_uint2((even_lanes & 0xFFFF) | odd_lanes << 16, even_lanes >> 16 | (odd_lanes & 0xFFFF0000));
    }

    // Each warpgroup lays its sums over its block's ring, idle by now; then each adds up, over all parts in order, the
    // columns dealt to it.
    __device__ __forceinline__ void store_shared_sum(const Sums& sums, const Stages& ring, u32 rank, int warp_pixel,
                                                     int first_filter) const {
        constexpr int BLOCKS = COLUMNS / 8, ALL = ATOMS * BLOCKS;
        constexpr int AT_ONCE = PARTS >= 16 ? 1 : 16 / PARTS < ALL ? 16 / PARTS : ALL;  // so much hides the way
        const int lane = threadIdx.x % 32, consumer = threadIdx.x / 128 - 1;
        const u32 own = ring.stages + threadIdx.x % 128 * 16;
        const auto part_of = [&](int writer, int j) { return own + (writer * ALL + j) * 128 * 16; };
        consumers_sync();  // the other warpgroup may still be reading the ring
#pragma unroll
        for (int j = 0; j < ALL; ++j) {
            const float* part = &sums[j / BLOCKS][j % BLOCKS * 4];
            store_shared(part_of(consumer, j), make_float4(part[0], part[1], part[2], part[3]));
        }
        if (SPLITS > 1) cluster_sync();
        else consumers_sync();
        const int first = DEPTH ? 2 * rank + consumer : rank;
        for (int start = first; start < ALL; start += AT_ONCE * PARTS) {
            float4 parts[AT_ONCE][PARTS];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (start + i * PARTS < ALL)
#pragma unroll
                    for (int part = 0; part < PARTS; ++part)
                        parts[i][part] = load_cluster(part_of(DEPTH ? part % 2 : consumer, start + i * PARTS),
                                                      DEPTH ? part / 2 : part);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int j = start + i * PARTS;
                if (j >= ALL) break;
                float4 total = parts[i][0];
#pragma unroll
                for (int part = 1; part < PARTS; ++part) {
                    total.x += parts[i][part].x, total.y += parts[i][part].y;
                    total.z += parts[i][part].z, total.w += parts[i][part].w;
                }
                const int pixel = warp_pixel + j / BLOCKS * 64 + lane / 4;
                const int filter = first_filter + j % BLOCKS * 8 + lane % 4 * 2;
                if (pixel < pixels) finish.store_pair(total.x, total.y, filter, offset(pixel), y);
                if (pixel + 8 < pixels) finish.store_pair(total.z, total.w, filter, offset(pixel + 8), y);
            }
        }
    }
};

// ------------------------------------------------------------------ results by the copy engine

// Registers to a panel, where residuals may lie already: bytes `filter` * sizeof(Output) of row `pixel`, 16-byte chunks
// swapped as the copy engine expects.
__device__ __forceinline__ u32 panel_address(u32 panel, int pixel, int filter) {
    const int byte = filter % BOX_FILTERS * sizeof(Output);
    return panel + filter / BOX_FILTERS * BOX_BYTES + pixel * ROW_BYTES + ((byte / 16 ^ pixel % 8) * 16) + byte % 16;
}

// 16-bit results: two blocks of 8 columns at a time by stmatrix, transposed if columns are pixels.
template <class Half>
__device__ __forceinline__ void write_matrices(const float* sums, u32 panel, const Finish& finish, int first_filter) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8;
#pragma unroll
    for (int block = 0; block < 8; block += 2) {
        const int pixel = SWAPPED ? 8 * (block + matrix / 2) + lane % 8 : 16 * warp + 8 * (matrix % 2) + lane % 8;
        const int chunk = SWAPPED ? 2 * warp + matrix % 2 : block + matrix / 2;
        const u32 address = panel_address(panel, pixel, chunk * 8);
        u32 packed[4];
        if (HAS_COMPANION) {
            if (SWAPPED) load_matrices_transposed(packed, address);
            else load_matrices(packed, address);
        }
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // part % 2: rows 8 to 15 of the warp's; part / 2: the second block
            const float* pair = sums + 4 * (block + part / 2) + 2 * (part % 2);
            const int low = SWAPPED ? 16 * warp + 8 * (part % 2) + lane / 4 : 8 * (block + part / 2) + 2 * (lane % 4);
            packed[part] = finish.packed<Half>(pair[0], pair[1], first_filter + low, first_filter + low + !SWAPPED,
                                               packed[part]);
        }
        if (SWAPPED) store_matrices_transposed(address, packed);
        else store_matrices(address, packed);
    }
}

// 32-bit results, each where it belongs: the lanes of a warp reach all banks.
__device__ __forceinline__ void write_words(const float* sums, u32 panel, const Finish& finish, int first_filter) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int block = 0; block < 8; ++block)
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int row = 16 * warp + 8 * (part / 2) + lane / 4, column = 8 * block + 2 * (lane % 4) + part % 2;
            const int pixel = SWAPPED ? column : row, filter = SWAPPED ? row : column;
            const u32 address = panel_address(panel, pixel, filter);
            const float residual = HAS_COMPANION ? load_shared(address) : 0.f;
            store_shared(address, finish.value(sums[4 * block + part], first_filter + filter, residual));
        }
}

template <int BUFFERS>
struct PanelWriter {
    const TensorMap &residual_map, &output_map;
    const Finish& finish;
    const Writer& writer;
    const int consumer;
    const u32 panels, barriers;                  // of this warpgroup
    const bool copier = threadIdx.x % 128 == 0;  // starts its copies
    u32 residual_parity = 0;

    struct Origin {
        int pixel, filter;
    };
    __device__ __forceinline__ static Origin origin(int first_pixel, int first_filter, int panel) {
        const int rows = panel / PANELS_AN_ATOM * 64, columns = panel % PANELS_AN_ATOM * 64;
        return {first_pixel + (SWAPPED ? columns : rows), first_filter + (SWAPPED ? rows : columns)};
    }

    __device__ __forceinline__ void fetch_residual(int first_pixel, int first_filter, int panel) {
        const int buffer = panel % BUFFERS;
        const Origin at = origin(first_pixel, first_filter, panel);
        tma_store_wait_read<0>();
        barrier_expect(barriers + 8 * buffer, PANEL_BYTES);
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            const u32 to = panels + buffer * PANEL_BYTES + box * BOX_BYTES, full = barriers + 8 * buffer;
            const int filter = at.filter + box * BOX_FILTERS;
            if constexpr (PLACED) {
                const Place origin_place = place(at.pixel, writer.shape, writer.placement);
                tma_load_im2col(to, residual_map, full, filter, origin_place.w, origin_place.h, origin_place.n, 0, 0);
            } else {
                tma_load_2d(to, residual_map, full, filter, at.pixel);
            }
        }
    }

    // Rows of a panel to where the placement has them, 16 bytes a thread, so that lines are written whole.
    __device__ __forceinline__ void store_placed(u32 panel, const Origin& at) const {
        constexpr int CHUNK = 16 / sizeof(Output), CHUNKS = 64 / CHUNK, AT_ONCE = 128 / CHUNKS;
        const int filter = threadIdx.x % CHUNKS * CHUNK, first = threadIdx.x % 128 / CHUNKS;
        if (!FILTERS_ALIGNED && at.filter + filter >= writer.shape.filters) return;
#pragma unroll
        for (int row = first; row < first + 64; row += AT_ONCE) {
            if (at.pixel + row >= writer.pixels) return;
            Output* to = writer.y + writer.offset(at.pixel + row) + at.filter + filter;
            *reinterpret_cast<float4*>(to) = load_shared_16(panel_address(panel, row, filter));
        }
    }

    // Before the products: residuals arrive under them.
    __device__ __forceinline__ void begin(int first_pixel, int first_filter) {
        if (HAS_COMPANION && copier)
            for (int panel = 0; panel < BUFFERS; ++panel) fetch_residual(first_pixel, first_filter, panel);
    }

    __device__ __forceinline__ void write(const Sums& sums, int first_pixel, int first_filter) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            const int buffer = panel % BUFFERS;
            const u32 here = panels + buffer * PANEL_BYTES;
            const Origin at = origin(first_pixel, first_filter, panel);
            if (HAS_COMPANION) {
                barrier_wait(barriers + 8 * buffer, residual_parity);
                if (buffer == BUFFERS - 1) residual_parity ^= 1;
            } else {
                if (!PLACED && copier) tma_store_wait_read<BUFFERS - 1>();
                warpgroup_sync(consumer);
            }
            const float* part = &sums[panel / PANELS_AN_ATOM][panel % PANELS_AN_ATOM * 32];
            if constexpr (sizeof(Output) == 2) write_matrices<Output>(part, here, finish, at.filter);
            else write_words(part, here, finish, at.filter);
            if constexpr (PLACED) {
                warpgroup_sync(consumer);
                store_placed(here, at);
            }
            if (!PLACED || HAS_COMPANION) {  // what comes next is a copy
                fence_async_proxy();
                warpgroup_sync(consumer);
            }
            if (copier) {
#pragma unroll
                for (int box = 0; box < (PLACED ? 0 : BOXES); ++box)
                    tma_store_2d(output_map, here + box * BOX_BYTES, at.filter + box * BOX_FILTERS, at.pixel);
                if (HAS_COMPANION && panel + BUFFERS < PANELS)
                    fetch_residual(first_pixel, first_filter, panel + BUFFERS);
            }
        }
    }

    // The panels are read before the block leaves.
    __device__ __forceinline__ void end() {
        if (copier) tma_store_wait_read<0>();
    }
};

// ------------------------------------------------------------------ kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_hopper_persistent(const __grid_constant__ TensorMap pixel_map, const __grid_constant__ TensorMap weight_map,
                             const __grid_constant__ TensorMap shortcut_map,
                             const __grid_constant__ TensorMap shortcut_weight_map,
                             const __grid_constant__ TensorMap residual_map,
                             const __grid_constant__ TensorMap output_map, const Bias* __restrict__ bias,
                             const float* __restrict__ scale, const float* __restrict__ scales,
                             const Element* __restrict__ residual, Output* __restrict__ y, ConvShape shape,
                             ShortcutShape shortcut_shape, Placement placement, int weights_settled, int relayed) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const u32 panels = shared_address(shared_memory);
    Stages ring(panels + 2 * BUFFERS * PANEL_BYTES);
    const u32 residual_barriers = ring.stages + Stages::BYTES;
    const u32 turn_barriers = residual_barriers + 2 * BUFFERS * 8;
    if (threadIdx.x == 0) {
        ring.init((TURNS || DEPTH ? 4 : 8) * CLUSTER);
        for (int buffer = 0; buffer < 2 * BUFFERS; ++buffer) barrier_init(residual_barriers + 8 * buffer, 1);
        for (int consumer = 0; consumer < 2; ++consumer) barrier_init(turn_barriers + 8 * consumer, 4);
        fence_barrier_init();
        fence_async_proxy();
        prefetch_map(pixel_map);
        prefetch_map(weight_map);
    }
    __syncthreads();
    u32 rank = 0;
    if (CLUSTER_BLOCKS > 1) {
        rank = cluster_rank();
        cluster_sync();  // the barriers of the others are ready too
    }
    const Problem problem(shape, shortcut_shape.channels);
    const int first = blockIdx.x / CLUSTER_BLOCKS, step = gridDim.x / CLUSTER_BLOCKS;
    const int block_slabs = problem.last_slab(rank) - problem.first_slab(rank);
    if (threadIdx.x < 128) {
        release_registers<40>();
        if (threadIdx.x == 0) {
            const Maps maps{pixel_map, weight_map, shortcut_map, shortcut_weight_map};
            const Copier copier{problem, maps, shortcut_shape.stride, rank};
            const int ahead = weights_settled ? copier.copy_ahead(ring, first) : 0;
            wait_for_previous_launch();
            copier.copy_tiles(ring, first, step, ahead);
            if (relayed) let_next_launch_start();
        }
        if (SPLITS > 1) cluster_sync();  // the one inside store_shared_sum counts all threads
    } else {
        claim_registers<232>();
        wait_for_previous_launch();
        const int consumer = threadIdx.x / 128 - 1;
        const int wg_pixel = SHARE == 1 ? consumer * WG_PIXELS : 0, wg_filter = SHARE == 2 ? consumer * WG_FILTERS : 0;
        const Finish finish{bias, scale, scales, residual, shape.filters};
        const Writer writer{finish, y, shape, placement, problem.pixels};
        PanelWriter<(BUFFERS > 0 ? BUFFERS : 1)> panel_writer{residual_map, output_map, finish, writer, consumer,
                                                              panels + consumer * BUFFERS * PANEL_BYTES,
                                                              residual_barriers + consumer * BUFFERS * 8};
        // Taking turns: a warpgroup begins when the other has waited for all stages of the tile before. The first turn
        // is free: a barrier that nobody has arrived at passes for the parity before.
        u32 turn = consumer == 0;
        const int slabs = DEPTH ? (block_slabs + 1 - consumer) / 2 : block_slabs;
        if (consumer == 1 && (TURNS || DEPTH)) ring.skip(TURNS ? slabs : 1);
        for (int index = first + (TURNS ? consumer * step : 0); index < problem.tiles;
             index += (TURNS ? 2 : 1) * step) {
            const Tile tile(problem, index, rank);
            const int pixel = tile.pixel + wg_pixel, filter = tile.filter + wg_filter;
            if (BUFFERS > 0) panel_writer.begin(pixel, filter);
            if (TURNS) barrier_wait(turn_barriers + 8 * consumer, turn);
            turn ^= 1;
            Sums sums;
            if constexpr (PROMOTED) multiply_promoted(sums, ring, slabs, wg_pixel, wg_filter);
            else multiply_slabs(sums, ring, slabs, wg_pixel, wg_filter);
            if (TURNS) {
                if (threadIdx.x % 32 == 0) barrier_arrive(turn_barriers + 8 * (1 - consumer));
                wgmma_wait<0>();
                release(ring, (ring.stage + STAGES - 1) % STAGES);
                ring.skip(slabs);
            }
            const int warp_pixel = pixel + threadIdx.x / 32 % 4 * 16;
            if constexpr (BUFFERS > 0) panel_writer.write(sums, pixel, filter);
            else if constexpr (PARTS > 1) writer.store_shared_sum(sums, ring, rank, warp_pixel, filter);
            else writer.store(sums, warp_pixel, filter);
        }
        if (BUFFERS > 0) panel_writer.end();
    }
    if (CLUSTER_BLOCKS > 1) cluster_sync();  // nobody leaves while another may reach into its shared memory
}
