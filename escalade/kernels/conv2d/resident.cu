// y[pixel][filter] = activated(sum over k of x[pixel][k] * weight[filter][k] + bias[filter] + residual[pixel][filter])
//
// 1x1 filters without padding, limited by memory and latency. A CTA loads its column of the weights, all of k, into
// smem once. Then its warps run independently, without barriers: each takes tiles of TILE pixels, loads their channels
// directly into mma.sync registers and stores results directly to y, both 16 bytes per lane; the weights are packed so
// that both orders fit (conv2d/resident.cuh). As soon as a block of channels is multiplied, the block DEPTH ahead is
// loaded into its registers, across tile boundaries too, so loads, MMAs and epilogues of different warps overlap. A
// prologue is applied to a block of channels in registers, right before its MMAs.
// Limiter: memory, or the epilogue if results are many and their activation is expensive.
//
// Rung: `resident`.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr int CHANNELS = 24;          // problem.channels
constexpr int FILTER_BLOCKS = 1;      // config.filter_blocks: 16-filter blocks per CTA
constexpr int DEPTH = 2;              // config.depth: channel blocks in flight per warp
constexpr int FILTERS = 40;           // problem.filters
constexpr int X_STEP = 24;            // problem.x_pitch or problem.channels
constexpr int Y_STEP = 40;            // problem.y_pitch or problem.filters
constexpr int PIXEL_BLOCKS = 1;       // config.pixel_blocks: 8-pixel blocks per warp tile
constexpr int WARPS = 4;              // config.warps
constexpr int BLOCKS_PER_SM = 8;      // config.blocks_per_sm
constexpr bool HAS_BIAS = false;      // problem.bias
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr bool HAS_RELU = false;      // problem.relu
#endif

#include "common/epilogue.cuh"
#include "common/mma_tile.cuh"
#include "common/pairs.cuh"
#include "common/prologue.cuh"
#include "conv2d/resident.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int TILE = PIXEL_BLOCKS * 8;                  // pixels per warp tile
constexpr int ROWS = PIXEL_BLOCKS * 2;                  // pixels whose results a lane holds in part
constexpr int RESULT_WORDS = FILTER_BLOCKS * 2 / WORD;  // per row
constexpr int COLUMN_FILTERS = FILTER_BLOCKS * 16, COLUMNS = (FILTERS + COLUMN_FILTERS - 1) / COLUMN_FILTERS;
#ifdef PROLOGUE
constexpr int ALL_CHANNELS = ROUNDS * DEPTH * BLOCK;  // including those of the last round that do not exist
#else
constexpr int ALL_CHANNELS = 0;
#endif
using Slot = u32[PIXEL_BLOCKS][4];  // a lane's part of a block of channels: one pixel in eight
using Accumulators = float[PIXEL_BLOCKS][FILTER_BLOCKS][4];

// Start of a lane's pixels of a tile in x, in units of 16 bytes. Past the last pixel it repeats that one.
struct Source {
    u32 pixels[PIXEL_BLOCKS];
    u32 gates[PIXEL_BLOCKS];  // of their images, likewise

    __device__ __forceinline__ Source(int tile, const ConvShape& shape, int all) {
#pragma unroll
        for (int i = 0; i < PIXEL_BLOCKS; ++i) {
            u32 pixel = min(tile * TILE + i * 8 + static_cast<int>(threadIdx.x) % 32 / 4, all - 1);
            gates[i] = pixel / (shape.output_height * shape.output_width) * (CHANNELS / LANE);
#ifdef STRIDED
            const u32 line = pixel / shape.output_width, image = line / shape.output_height;
            pixel = (image * shape.height + line % shape.output_height * shape.stride_h) * shape.width +
                    pixel % shape.output_width * shape.stride_w;
#endif
            pixels[i] = pixel * (X_STEP / LANE);
        }
    }
};

// A lane's channels of a block; zeros past the last channel if the block may exceed it (PARTIAL).
template <int WORDS, bool PARTIAL>
__device__ __forceinline__ void load(Slot& slot, const Element* x, const Source& source, int block) {
    const int channel = block * BLOCK + threadIdx.x % 4 * (WORDS * WORD);
    const bool exists = !PARTIAL || channel < CHANNELS;
#pragma unroll
    for (int i = 0; i < PIXEL_BLOCKS; ++i) {
        const Element* const from = x + 1ULL * source.pixels[i] * LANE + (exists ? channel : 0);
        const Pack<u32, WORDS> pack = load_pack<u32, WORDS>(reinterpret_cast<const u32*>(from));
#pragma unroll
        for (int word = 0; word < WORDS; ++word) slot[i][word] = exists ? pack.at[word] : 0;
    }
}

// True if a block, or any block that shares its slot, may exceed the channels.
__host__ __device__ constexpr bool is_partial(int block) { return (block + 1) * BLOCK > CHANNELS; }

// Loads a slot's block of a tile's first round.
template <int SLOT>
__device__ __forceinline__ void load_first(Slot& slot, const Element* x, const Source& source) {
    constexpr bool halved = HALF && SLOT == BLOCKS - 1;
    load<halved ? 2 : 4, halved ? CHANNELS % (BLOCK / 2) != 0 : is_partial(SLOT)>(slot, x, source, SLOT);
}

// Two adjacent elements as stored, and back. Templates because 32-bit results have no packed pairs.
template <class Stored = Element>
__device__ __forceinline__ void to_words(u32* words, float low, float high) {
    if constexpr (sizeof(Stored) == 2) words[0] = pack_pair<Stored>(low, high);
    else words[0] = __float_as_uint(low), words[1] = __float_as_uint(high);
}

template <class Stored = Element>
__device__ __forceinline__ float2 from_words(const u32* words) {
    if constexpr (sizeof(Stored) == 2) return unpack_pair<Stored>(words[0]);
    else return make_float2(__uint_as_float(words[0]), __uint_as_float(words[1]));
}

// Operands of the prologue besides x; gains and shifts are in smem, zero past the last channel.
struct PrologueTables {
    const float *gains, *shifts;
    const Element* gates;
};

// Applies the prologue to a lane's channels of a block.
template <int WORDS, bool PARTIAL>
__device__ __forceinline__ void prepare(Slot& slot, const Source& source, int block, const PrologueTables& operands) {
#ifdef PROLOGUE
    constexpr int COUNT = WORDS * WORD;
    const int channel = block * BLOCK + anew(threadIdx.x % 4) * COUNT;
    const bool exists = !PARTIAL || channel < CHANNELS;
    Pack<float, COUNT> gains = {}, shifts = {};
    if (PROLOGUE_GAIN) gains = load_pack<float, COUNT>(operands.gains + channel);
    if (PROLOGUE_SHIFT) shifts = load_pack<float, COUNT>(operands.shifts + channel);
#pragma unroll
    for (int i = 0; i < PIXEL_BLOCKS; ++i) {
        Pack<u32, WORDS> gates = {};
        if (PROLOGUE_GATE)
            gates = load_pack<u32, WORDS>(reinterpret_cast<const u32*>(
                operands.gates + 1ULL * source.gates[i] * LANE + (exists ? channel : 0)));
#pragma unroll
        for (int word = 0; word < WORDS; word += 2 / WORD) {
            const int e = word * WORD;
            const float2 two = from_words(&slot[i][word]), gate = from_words(&gates.at[word]);
            to_words(&slot[i][word], prologue(two.x, gains.at[e], shifts.at[e], gate.x),
                     prologue(two.y, gains.at[e + 1], shifts.at[e + 1], gate.y));
        }
#pragma unroll
        for (int word = 0; word < WORDS; ++word) slot[i][word] = exists ? slot[i][word] : 0;
    }
#endif
}

// One block of channels: all pixels by all filters, starting with the weights of its first step.
template <int COUNT>
__device__ __forceinline__ void multiply(Accumulators& acc, const Slot& slot, const u32* weights) {
    const int lane = anew(threadIdx.x % 32);  // else the compiler hoists the weight loads and keeps them in registers
#pragma unroll
    for (int step = 0; step < COUNT; ++step) {
        u32 b[PIXEL_BLOCKS][2];
#pragma unroll
        for (int i = 0; i < PIXEL_BLOCKS; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const u32 word = slot[i][2 * step + e];
                b[i][e] = sizeof(Element) == 4 ? to_tf32(__uint_as_float(word)) : word;
            }
#pragma unroll
        for (int j = 0; j < FILTER_BLOCKS; ++j) {
            const Pack<u32, 4> a = load_pack<u32, 4>(weights + step * STEP_WORDS + (j * 32 + lane) * 4);
#pragma unroll
            for (int i = 0; i < PIXEL_BLOCKS; ++i) multiply_add<Element>(acc[i][j], a.at, b[i]);
        }
    }
}

// Multiplies all slots of a round in order and refills each: from this tile or, in its LAST round, from the next.
template <bool LAST, int SLOT = 0>
__device__ __forceinline__ void run_round(Accumulators& acc, Slot (&slots)[DEPTH], const u32* weights, const Element* x,
                                          const Source& now, const Source& next, int round,
                                          const PrologueTables& operands) {
    if constexpr (SLOT < DEPTH) {
        constexpr bool halved = HALF && SLOT == BLOCKS - 1;
        const int block = round * DEPTH + SLOT;
        prepare<halved ? 2 : 4, LAST && is_partial((ROUNDS - 1) * DEPTH + SLOT)>(slots[SLOT], now, block, operands);
        multiply<halved ? 1 : 2>(acc, slots[SLOT], weights + block * 2 * STEP_WORDS);
        if constexpr (LAST) load_first<SLOT>(slots[SLOT], x, next);
        else load<4, is_partial((ROUNDS - 1) * DEPTH + SLOT)>(slots[SLOT], x, now, block + DEPTH);
        run_round<LAST, SLOT + 1>(acc, slots, weights, x, now, next, round, operands);
    }
}

template <int SLOT = 0>
__device__ __forceinline__ void fill(Slot (&slots)[DEPTH], const Element* x, const Source& source) {
    if constexpr (SLOT < DEPTH) {
        load_first<SLOT>(slots[SLOT], x, source);
        fill<SLOT + 1>(slots, x, source);
    }
}

// A lane's results: 2 * WIDTH adjacent filters of each group of WIDTH blocks, for two pixels in eight.
struct Target {
    int left, first_filter;
    long long at;

    __device__ __forceinline__ Target(int tile, int all, int first_filter) : first_filter(first_filter) {
        const int pixel = tile * TILE + threadIdx.x % 4 * 2;
        left = all - pixel, at = 1LL * pixel * Y_STEP + first_filter;
    }

    template <int FIRST>
    __device__ __forceinline__ static int filter() {
        return FIRST * 16 + threadIdx.x % 32 / 4 * (2 * width_from(FIRST));
    }

    template <int FIRST>
    __device__ __forceinline__ bool has(int row) const {
        return row / 2 * 8 + row % 2 < left &&
               (FILTERS % COLUMN_FILTERS == 0 || first_filter + filter<FIRST>() < FILTERS);
    }

    template <int FIRST>
    __device__ __forceinline__ long long offset(int row) const {
        return at + (row / 2 * 8 + row % 2) * Y_STEP + filter<FIRST>();
    }
};

// Initializes the accumulators with the bias.
template <int FIRST = 0>
__device__ __forceinline__ void begin(Accumulators& acc, const float* biases) {
    if constexpr (FIRST < FILTER_BLOCKS) {
        constexpr int WIDTH = width_from(FIRST);
        Pack<float, 2 * WIDTH> values = {};
        if (HAS_BIAS) values = load_pack<float, 2 * WIDTH>(biases + Target::filter<FIRST>());
#pragma unroll
        for (int i = 0; i < PIXEL_BLOCKS; ++i)
#pragma unroll
            for (int e = 0; e < 4 * WIDTH; ++e) acc[i][FIRST + e / 4][e % 4] = values.at[e / 2];
        begin<FIRST + WIDTH>(acc, biases);
    }
}

using Residuals = u32[ROWS][RESULT_WORDS];

template <int FIRST = 0>
__device__ __forceinline__ void read_residuals(Residuals& residuals, const Element* residual, const Target& target) {
    if constexpr (FIRST < FILTER_BLOCKS) {
        constexpr int WORDS = width_from(FIRST) * 2 / WORD;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            Pack<u32, WORDS> pack = {};
            if (target.has<FIRST>(row))
                pack = load_pack<u32, WORDS>(reinterpret_cast<const u32*>(residual + target.offset<FIRST>(row)));
#pragma unroll
            for (int word = 0; word < WORDS; ++word) residuals[row][FIRST * 2 / WORD + word] = pack.at[word];
        }
        read_residuals<FIRST + width_from(FIRST)>(residuals, residual, target);
    }
}

template <int WORDS>
__device__ __forceinline__ void store(Element* to, const Pack<u32, WORDS>& pack) {
    if constexpr (WORDS == 4) store_16(to, make_uint4(pack.at[0], pack.at[1], pack.at[2], pack.at[3]));
    else store_pack(reinterpret_cast<u32*>(to), pack);
}

template <int FIRST = 0>
__device__ __forceinline__ void finish(const Accumulators& acc, const Residuals& residuals, Element* y,
                                       const Target& target) {
    if constexpr (FIRST < FILTER_BLOCKS) {
        constexpr int WIDTH = width_from(FIRST), WORDS = WIDTH * 2 / WORD;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            Pack<u32, WORDS> pack;
#pragma unroll
            for (int block = 0; block < WIDTH; ++block) {
                const float (&four)[4] = acc[row / 2][FIRST + block];
                float2 other = {};
                if (HAS_RESIDUAL) other = from_words(&residuals[row][(FIRST + block) * 2 / WORD]);
                const float2 two = activated_pair<HAS_RESIDUAL, HAS_RELU>({four[row % 2], four[row % 2 + 2]}, other);
                to_words(&pack.at[block * 2 / WORD], two.x, two.y);
            }
            if (target.has<FIRST>(row)) store<WORDS>(y + target.offset<FIRST>(row), pack);
        }
        finish<FIRST + WIDTH>(acc, residuals, y, target);
    }
}

// One cp.async group per round, so that the first MMAs need not wait for the last weights.
__device__ __forceinline__ void copy_weights(u32* weights, const u32* packed) {
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll 4
        for (int word = threadIdx.x * 4; word < ROUND_WORDS; word += THREADS * 4)
            copy_async_16(shared_address(weights + round * ROUND_WORDS + word), packed + round * ROUND_WORDS + word, true);
        copy_async_commit();
    }
}

// Called by all threads once per round, in order. On return the round's weights are visible to all; those of the
// PENDING later rounds may still be in flight.
template <int PENDING = ROUNDS - 1>
__device__ __forceinline__ void await_weights(int round) {
    if constexpr (PENDING > 0) {
        if (round < ROUNDS - PENDING) {
            copy_async_wait<PENDING>();
            return __syncthreads();
        }
        await_weights<PENDING - 1>(round);
    } else {
        copy_async_wait<0>();
        __syncthreads();
    }
}

// Copies `count` values, zero-filled from index `existing` on.
template <class From>
__device__ __forceinline__ void copy_floats(float* to, const From* from, int count, int existing) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) to[i] = i < existing ? to_float(from[i]) : 0.f;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_resident(const Element* __restrict__ x, const u32* __restrict__ packed, const Element* __restrict__ bias,
                    const Element* __restrict__ residual, Element* __restrict__ y, const float* __restrict__ gains,
                    const float* __restrict__ shifts, const Element* __restrict__ gates, ConvShape shape,
                    int weights_ready, int release_dependents) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    u32* const weights = shared_part(reinterpret_cast<u32*>(shared_memory), COLUMN_WORDS);
    float* const numbers = reinterpret_cast<float*>(shared_memory) + COLUMN_WORDS;
    float* const biases = shared_part(numbers, COLUMN_FILTERS);
    float* const all_gains = shared_part(numbers + COLUMN_FILTERS, ALL_CHANNELS);
    float* const all_shifts = shared_part(numbers + COLUMN_FILTERS + ALL_CHANNELS, ALL_CHANNELS);
    const PrologueTables operands{all_gains, all_shifts, gates};
    const int column = blockIdx.x % COLUMNS, first_filter = column * COLUMN_FILTERS;
    const int pixels = shape.batch * shape.output_height * shape.output_width, tiles = (pixels + TILE - 1) / TILE;
    const int stride = gridDim.x / COLUMNS * WARPS;
    int tile = blockIdx.x / COLUMNS * WARPS + threadIdx.x / 32;

    packed += 1LL * column * COLUMN_WORDS;
    if (weights_ready) copy_weights(weights, packed);
    wait_for_previous_launch();
    if (!weights_ready) copy_weights(weights, packed);
    Source now(tile, shape, pixels);
    Slot slots[DEPTH];
    fill(slots, x, now);
    if (HAS_BIAS) copy_floats(biases, bias + first_filter, COLUMN_FILTERS, FILTERS - first_filter);
#ifdef PROLOGUE
    if (PROLOGUE_GAIN) copy_floats(all_gains, gains, ALL_CHANNELS, CHANNELS);
    if (PROLOGUE_SHIFT) copy_floats(all_shifts, shifts, ALL_CHANNELS, CHANNELS);
#endif
    if (release_dependents) let_next_launch_start();

    // Every warp takes at least one tile; a warp without one takes a tile whose stores are all masked. The whole CTA
    // must reach the barriers of `await_weights` at the same point.
    await_weights(0);
    int awaited = 1;  // rounds whose weights have arrived
#pragma unroll 1
    do {
        const Source next(tile + stride, shape, pixels);
        const Target target(tile, pixels, first_filter);
        Residuals residuals;
        if (HAS_RESIDUAL) read_residuals(residuals, residual, target);
        Accumulators acc;
        begin(acc, biases);
#pragma unroll 1
        for (int round = 0; round < ROUNDS - 1; ++round) {
            run_round<false>(acc, slots, weights, x, now, next, round, operands);
            if (awaited < ROUNDS) await_weights(awaited++);
        }
        run_round<true>(acc, slots, weights, x, now, next, ROUNDS - 1, operands);
        finish(acc, residuals, y, target);
        now = next;
        tile += stride;
    } while (tile < tiles);
}
