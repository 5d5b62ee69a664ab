// y = pool(relu(sum over r, s, c of pixel[row*2 + r][column*2 + s][c] * weight[filter][r][s][c] + bias))
//
// The stem's GEMM by wgmma, with less padding in k (sm90_streamed_dense.cuh), and streamed: persistent CTAs have two
// ranges of rows of y each and walk down both once. For each range a producer warpgroup loads the image two rows at a
// time, converts them and stores them in a ring of stages; a consumer multiplies and pools. The two consumers
// ping-pong: the tensor cores run one's row while the other pools and stores. Rows of the convolution are computed
// twice only where a range begins.
// Limiter: tensor cores, 64 x COLUMNS x 16 per step, 176 of k for 147 useful (7x7); then memory.
//
// The prelude defines, besides the needs of tile.cuh and sm90_streamed_dense.cuh, STAGES and PAIR_LOADS (the two pixels
// of a slot are both inside or both outside the image, and aligned).
//
// Rung: `streamed`. conv2d launches it as its rung `stem`: POOL 0, SOURCE_NHWC, a 16-bit Source. Read
// sm90_streamed_dense.cuh (order of k), tile.cuh (columns, pooling), then row_product.cuh.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int FILTER_HEIGHT = 7;    // problem.filter_height
constexpr int FILTER_WIDTH = 7;     // problem.filter_width
constexpr int STAGES = 12;          // config.stages: pairs of image rows
constexpr bool PAIR_LOADS = false;  // problem.width % 2 == 0 and problem.padding[1] % 2 == 1
#endif

#include "common/ring.cuh"
#include "stem/sm90_streamed_dense.cuh"
#include "stem/row_product.cuh"
#include "stem/tile.cuh"

static_assert(CHANNELS == 3, "slots of two pixels have 6 values");

constexpr int STREAMS = 2;  // per CTA
constexpr int THREADS = STREAMS * 256;
constexpr int TOGETHER = 4;        // stages loaded at a time
constexpr int SLOTS_OF_WARP = 31;  // the first lane has only the preceding pixel
constexpr int SLOTS = COLUMNS + SLOTS_IN_ROW - 1;
constexpr int ROW_BYTES = SLOTS * 16;
constexpr int CORNERS = 2 * ROW_BYTES;  // a stage: two rows, then the corners of the windows that end there
constexpr int STAGE_BYTES = (CORNERS + COLUMNS * 16 + 1023) / 1024 * 1024;
static_assert(SLOTS <= 4 * SLOTS_OF_WARP, "one slot per thread");
static_assert(STAGES >= ROW_PAIRS + TOGETHER, "a window and the stages loaded next");

using Stages = Ring<STAGES, STAGE_BYTES>;
using Writer = RowWriter<1, COLUMN_BLOCKS, false>;

// ------------------------------------------------------------------ row ranges

// Rows of y, numbered through all columns of tiles of all images; below 2^31.
struct Range {
    int first, last;

    // Range of a CTA's stream. If the rows are few, the first streams of all CTAs have them.
    __device__ __forceinline__ Range(int stream, const StemShape& shape) {
        const int rows = shape.batch * shape.column_tiles * shape.output_height, streams = gridDim.x * STREAMS;
        const int each = rows / streams, more = rows % streams;  // `more` streams have one extra row
        const int number = stream * gridDim.x + blockIdx.x;
        first = number * each + min(number, more);
        last = first + each + (number < more);
    }

    // Pieces of the range, each in one column of tiles.
    __device__ __forceinline__ int pieces(const StemShape& shape) const {
        return first == last ? 0 : (last - 1) / shape.output_height - first / shape.output_height + 1;
    }

    // Rows of the convolution.
    __device__ __forceinline__ int conv_rows(const StemShape& shape) const {
        return (last - first) * POOL_STRIDE + (POOL == 3) * pieces(shape);
    }
};

struct Piece {
    Tile tile;
    int rows;  // of y

    // The piece that begins with the first row of a range.
    __device__ __forceinline__ Piece(const Range& range, const StemShape& shape)
        : Piece(range.first / shape.output_height, range.first % shape.output_height, range, shape) {}

private:
    __device__ __forceinline__ Piece(int column, int row, const Range& range, const StemShape& shape)
        : tile(column / shape.column_tiles, row, column % shape.column_tiles),
          rows(min(range.last - range.first, shape.output_height - row)) {}
};

// ------------------------------------------------------------------ producer: the image

using Slot = Source[2][CHANNELS];  // two pixels of a row, as stored in the source

__device__ __forceinline__ bool exists(int row, int column, const StemShape& shape) {
    return inside(row, shape.height) && inside(column, shape.width);
}

// One slot of two rows, starting at `row`.
__device__ __forceinline__ void load_slots(Slot (&slots)[2], const Source* __restrict__ image, int row, int column,
                                           bool wanted, const StemShape& shape) {
    const int plane = shape.height * shape.width;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Source* source = image + source_offset(row + i, column, 0, shape);
        if constexpr (PAIR_LOADS) {
#pragma unroll
            for (int part = 0; part < CHANNELS; ++part) {
                Pack<Source, 2> two = {};
                if (wanted && exists(row + i, column, shape))
                    two = load_pack<Source, 2>(source + part * (SOURCE_NHWC ? 2 : plane));
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int at = part * 2 + e;
                    if (SOURCE_NHWC) slots[i][at / CHANNELS][at % CHANNELS] = two.at[e];
                    else slots[i][e][part] = two.at[e];
                }
            }
        } else {
#pragma unroll
            for (int pixel = 0; pixel < 2; ++pixel)
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) {
                    const int offset = SOURCE_NHWC ? pixel * CHANNELS + c : c * plane + pixel;
                    slots[i][pixel][c] = wanted && exists(row + i, column + pixel, shape) ? source[offset] : Source{};
                }
        }
    }
}

struct Normalization {
    float scale[CHANNELS], shift[CHANNELS];
};

// A slot without the preceding pixel: channels 0 and 1 of both pixels, then channel 2 of both.
__device__ __forceinline__ Pack<u32, 4> converted(const Slot& slot, int row, int column, const StemShape& shape,
                                                  const Normalization& normalization) {
    float pixels[2][CHANNELS] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
            if (!NORMALISE || exists(row, column + i, shape))
                pixels[i][c] = normalized(slot[i][c], c, normalization.scale, normalization.shift);
    return {{pair_of(pixels[0][0], pixels[0][1]), pair_of(pixels[1][0], pixels[1][1]),
             pair_of(pixels[0][2], pixels[1][2]), 0}};
}

// Producer warpgroup. Loads of several stages are in flight at a time, and one fence serves them all.
__device__ __forceinline__ void fill(unsigned char* stages, Stages ring, const Source* __restrict__ x,
                                     const float* __restrict__ scale, const float* __restrict__ shift, Range range,
                                     const StemShape& shape) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int slot = warp * SLOTS_OF_WARP + lane - 1;
    const bool has_slot = lane > 0 && slot < SLOTS, has_corner = (lane > 0 || warp == 0) && slot + 1 < COLUMNS;
    Normalization normalization;
    if (NORMALISE) {
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) normalization.scale[c] = scale[c], normalization.shift[c] = shift[c];
    }

    u32 corners[ROW_PAIRS] = {};  // two rows each, the newest last
    while (range.first < range.last) {
        const Piece piece(range, shape);
        range.first += piece.rows;
        const Source* image = x + piece.tile.image * CHANNELS * shape.height * shape.width;
        const int column = (piece.tile.conv_column + slot) * 2 + 1 - shape.pad_w;
        int row = piece.tile.conv_row * 2 - shape.pad_h;
#pragma unroll 1
        for (int left = conv_rows(piece.rows) + ROW_PAIRS - 1; left > 0; left -= TOGETHER, row += 2 * TOGETHER) {
            Slot slots[TOGETHER][2];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (i < left) load_slots(slots[i], image, row + 2 * i, column, slot < SLOTS, shape);
            Stages filled = ring;
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                if (i >= left) break;
                Pack<u32, 4> rows[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    rows[r] = converted(slots[i][r], row + 2 * i + r, column, shape, normalization);
                    rows[r].at[3] = __shfl_up_sync(~0u, rows[r].at[1], 1);
                }
#pragma unroll
                for (int k = 0; k + 1 < ROW_PAIRS; ++k) corners[k] = corners[k + 1];
                corners[ROW_PAIRS - 1] = (rows[0].at[2] >> 16) | (rows[1].at[2] & 0xFFFF0000u);

                ring.wait_empty();
                unsigned char* stage = stages + ring.stage * STAGE_BYTES;
                if (has_slot) {
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        store_pack(reinterpret_cast<u32*>(stage + r * ROW_BYTES + slot * 16), rows[r]);
                }
                if (has_corner) {
                    Pack<u32, 4> corner = {};
#pragma unroll
                    for (int k = 0; k < ROW_PAIRS; ++k) corner.at[k] = corners[k];
                    if (FILTER_HEIGHT % 2) corner.at[ROW_PAIRS - 1] &= 0xFFFF;  // windows do not cover the second row
                    corner.at[3] |= pair_of(0.f, 1.f);                          // for the bias
                    store_pack(reinterpret_cast<u32*>(stage + CORNERS + (slot + 1) * 16), corner);
                }
                ring.next();
            }
            fence_async_proxy();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                if (i >= left) break;
                if (lane == 0) barrier_arrive(filled.full(filled.stage));
                filled.next();
            }
        }
    }
}

// ------------------------------------------------------------------ consumer: the GEMM

// Offset of a chunk in its stage, for the first window.
__device__ __forceinline__ constexpr int chunk_offset(Chunk chunk) {
    return chunk.row == CORNER ? CORNERS : chunk.row % 2 * ROW_BYTES + chunk.slot * 16;
}

// Ping-pong of the two warpgroups: one barrier each, at which the other arrives once it has issued its row.
constexpr int FIRST_TURN = 1;
__device__ __forceinline__ void wait_for_turn(int stream) { named_barrier_sync(FIRST_TURN + stream, 256); }
__device__ __forceinline__ void pass_turn(int stream) { named_barrier_arrive(FIRST_TURN + 1 - stream, 256); }

__device__ __forceinline__ void multiply_row(Writer::Accumulators& acc, const u32 (&weights)[STEPS][4],
                                             const Stages& ring) {
    u64 pixels[ROW_PAIRS];  // stages, without the distance between a step's chunks
#pragma unroll
    for (int pair = 0; pair < ROW_PAIRS; ++pair) {
        const int stage = ring.stage + pair;
        pixels[pair] =
            overlapping_descriptor(ring.stages + (stage < STAGES ? stage : stage - STAGES) * STAGE_BYTES, 0, 128);
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const Chunk chunk = chunk_of(step, 0);
        const int offset = chunk_offset(chunk), distance = chunk_offset(chunk_of(step, 1)) - offset;
        const u64 stage = pixels[chunk.row == CORNER ? ROW_PAIRS - 1 : chunk.row / 2];
        const u32 low = static_cast<u32>(stage) + (offset >> 4) + (distance >> 4 << 16);
        multiply(Element{}, reinterpret_cast<Flat&>(acc), weights[step], stage >> 32 << 32 | low, step > 0);
    }
    wgmma_commit();
}

// Consumer warpgroup. Both take the same number of turns, with or without a row.
__device__ __forceinline__ void convolve(Stages ring, const u32* __restrict__ packed, Output* __restrict__ y,
                                         int stream, Range range, int turns, const StemShape& shape) {
    const int block = blockIdx.y * 4 + threadIdx.x / 32 % 4;  // of 16 filters
    u32 weights[STEPS][4];
    load_weights(weights, packed, block, shape.filters / 16);
    Writer::Accumulators acc;
    Stages newest = ring;
    if (stream == 1 && turns > 0) pass_turn(stream);  // the other begins
    while (range.first < range.last) {
        const Piece piece(range, shape);
        range.first += piece.rows;
        Writer writer(shape, piece.tile, y, nullptr, block * 16);
        writer.move_to(piece.tile.conv_column);
#pragma unroll 1
        for (int pair = 0; pair < ROW_PAIRS - 1; ++pair) {
            newest.wait_full();
            newest.next();
        }
#pragma unroll 1
        for (int local = 0; local < conv_rows(piece.rows); ++local) {
            const bool exists = inside(piece.tile.conv_row + local, shape.conv_height);
            newest.wait_full();
            newest.next();
            wait_for_turn(stream);
            if (exists) multiply_row(acc, weights, ring);
            if (--turns > 0 || stream == 0) pass_turn(stream);
            wgmma_wait<0>();
            ring.release(ring.stage);
            ring.next();
            const int row = piece.tile.row + completed(local);
            if (exists) {
                u32 edge[1] = {LOWEST};
                writer.add(acc, edge, completes(local), row);
            } else {
                writer.add_missing_row(completes(local), row);
            }
        }
#pragma unroll 1
        for (int pair = 0; pair < ROW_PAIRS - 1; ++pair) {
            ring.release(ring.stage);
            ring.next();
        }
    }
    while (turns > 0) {
        wait_for_turn(stream);
        if (--turns > 0 || stream == 0) pass_turn(stream);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    stem_sm90_streamed(const Source* __restrict__ x, const u32* __restrict__ packed, const Element*,
                       const float* __restrict__ scale, const float* __restrict__ shift, Output* __restrict__ y,
                       StemShape shape, int release_dependents) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // tells the compiler that it is warp-uniform
    const int stream = warpgroup % STREAMS;
    unsigned char* stages = shared_memory + stream * STAGES * STAGE_BYTES;
    const u32 barriers = shared_address(shared_memory) + STREAMS * STAGES * STAGE_BYTES + stream * STAGES * 16;
    const Stages ring(shared_address(stages), barriers);
    if (threadIdx.x % 128 == 0 && warpgroup < STREAMS) {
        ring.init(4, 4);  // the warps of a warpgroup
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_launch();
    if (release_dependents) let_next_launch_start();

    const Range range(stream, shape);
    if (warpgroup < STREAMS) {
        release_registers<88>();
        fill(stages, ring, x, scale, shift, range, shape);
    } else {
        claim_registers<168>();
        const int turns = max(range.conv_rows(shape), Range(1 - stream, shape).conv_rows(shape));
        convolve(ring, packed, y, stream, range, turns, shape);
    }
}
