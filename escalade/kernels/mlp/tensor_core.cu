// y = the whole chain of layers of each row of x, on tensor cores, without leaving the registers
//
// A warp takes SETS times 16 rows, for which it reads each weight once. The row is wide at the input and output, and
// narrow in between:
//   in   per block of the row: [layer of every group: norm, product, activation] -> partial sums of the first layer
//        that reads the whole row
//   mid  narrow layers: accumulators -> activation -> operand of the next
//   out  per block of the result: its part of the last layer [-> layer of every group] -> y, or the squared distance
//        from x
// A lane's MMA accumulators are its operands of the next MMA (columns.cuh), so only x, y and weights move. The weight
// and bias of norms are folded into the product that follows (tensor_core_pack.cu). For batches too small to fill the
// GPU, TILE_WARPS warps, or those of a CLUSTER of CTAs, share 16 rows: each takes some of the blocks (or pieces of one:
// some outputs of the layer of every group), and their sums are reduced through smem or DSMEM.
// Limiter: for large batches the instructions around the MMAs, then x in and y out; for small ones the latency of one
// pass.
//
// Rung              switches
//   tensor_core     none
//   folded          none: two layers were merged before (tensor_core_fold.cu)
//   shared_rows     TILE_WARPS, PIECES
//   clustered_rows  CLUSTER, PIECES
// Read columns.cuh (register layout), rows.cuh (register forms), operand.cuh (MMA operands), then activation.cuh.
#if CLUSTER > 1
#include "common/hopper.cuh"
#endif

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                    // problem.dtype
using Output = float;                     // "fp32" if problem.output == "error" else problem.dtype
constexpr bool ERROR = false;             // problem.output == "error"
constexpr int FRAGMENTS = 116;            // stages.fragments: 16x16 pieces of all weights
constexpr int PACKED_BYTES = 122880;      // packed_bytes
constexpr bool HAS_ENCODER = true;        // stages.has_encoder: the first layer has groups
constexpr bool HAS_DECODER = true;        // stages.has_decoder: the last layer has groups
constexpr int BLOCKS_IN = 5;              // stages.blocks_in
constexpr int BLOCKS_OUT = 5;             // stages.blocks_out
constexpr int WIDTH_IN = 320;             // problem.features
constexpr int WIDTH_OUT = 320;            // problem.outputs
constexpr int VECTOR_IN = 4;              // vector_in
constexpr int VECTOR_OUT = 4;             // vector_out
constexpr int WARPS = 8;                  // config.warps: per CTA
constexpr int TILE_WARPS = 1;             // config.tile_warps: per 16 rows
#define CLUSTER 1                         // config.cluster: CTAs per rows
constexpr int SETS = 1;                   // config.sets: of 16 rows per warp
constexpr int PIECES = 1;                 // config.pieces: of a grouped layer
constexpr int UNROLL = 4;                 // config.unroll
constexpr bool WEIGHTS_IN_SHARED = true;  // config.weights_in_shared
constexpr int BLOCKS_PER_SM = 1;          // config.blocks_per_sm
#endif

#include "mlp/activation.cuh"
#include "mlp/rows.cuh"

struct Layer {
    int features, outputs;  // per block
    bool norm;
    float epsilon;
    int activation;
    int weights, biases;  // start: in fragments, in steps of 16 outputs
};
constexpr Layer LAYERS[] = {LAYER_TABLE};
constexpr int COUNT = sizeof(LAYERS) / sizeof(Layer);
constexpr int REDUCE = HAS_ENCODER ? 1 : 0, EXPAND = COUNT - 1 - (HAS_DECODER ? 1 : 0);
constexpr int IN = LAYERS[0].features, OUT = LAYERS[COUNT - 1].outputs;
constexpr int SET_ROWS = 16, TILE_ROWS = SETS * SET_ROWS, TILES = WARPS / TILE_WARPS;
constexpr int PARTS = TILE_WARPS * CLUSTER;  // of a tile's work
static_assert(SETS == 1 || PARTS == 1, "warps that share rows have one set");
static_assert(CLUSTER == 1 || TILES == 1, "CTAs that share rows have one tile");
constexpr int FRAGMENT = Fragment<Element>::PACKS;

// ------------------------------------------------------------------ products

// Initializes the accumulators of 16 outputs with their biases, which are packed in accumulator order, twice for two
// rows.
__device__ __forceinline__ void begin(float (&low)[4], float (&high)[4], const float4* biases, int member) {
    const float4 first = biases[member], second = biases[4 + member];
    low[0] = first.x, low[1] = first.y, low[2] = first.z, low[3] = first.w;
    high[0] = second.x, high[1] = second.y, high[2] = second.z, high[3] = second.w;
}

template <int ACTIVATION>
__device__ __forceinline__ void activate(float (&low)[4], float (&high)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) low[i] = activate<ACTIVATION>(low[i]), high[i] = activate<ACTIVATION>(high[i]);
}

// Packed weights and biases of all layers; this lane's share of each fragment.
struct Weights {
    const uint4* fragments;
    const float4* biases;
    int lane;

    template <int L>
    __device__ __forceinline__ const uint4* fragment(int block, int step, int output_step) const {
        constexpr int STEPS = steps_of(LAYERS[L].features), OUTPUT_STEPS = steps_of(LAYERS[L].outputs);
        return fragments + (LAYERS[L].weights + (block * STEPS + step) * OUTPUT_STEPS + output_step) * FRAGMENT + lane;
    }

    template <int L>
    __device__ __forceinline__ const float4* bias(int block, int output_step) const {
        return biases + (LAYERS[L].biases + block * steps_of(LAYERS[L].outputs) + output_step) * 8;
    }
};

// One per set of 16 rows of the warp.
template <class T>
struct PerSet {
    T set[SETS];
};

// 16 outputs of a layer, from the operand of its whole input.
template <int L>
__device__ __forceinline__ void layer_step(float (&low)[SETS][4], float (&high)[SETS][4],
                                           const PerSet<Operand<LAYERS[L].features>>& operand, const Weights& weights,
                                           int block, int output_step) {
#pragma unroll
    for (int set = 0; set < SETS; ++set)
        begin(low[set], high[set], weights.template bias<L>(block, output_step), weights.lane % 4);
#pragma unroll
    for (int step = 0; step < steps_of(LAYERS[L].features); ++step) {
        const Fragment<Element> fragment(weights.template fragment<L>(block, step, output_step));
#pragma unroll
        for (int set = 0; set < SETS; ++set) operand.set[set].at[step].multiply(low[set], high[set], fragment);
    }
#pragma unroll
    for (int set = 0; set < SETS; ++set) activate<LAYERS[L].activation>(low[set], high[set]);
}

template <int L>
__device__ __forceinline__ void layer(PerSet<Values<LAYERS[L].outputs>>& values,
                                      const PerSet<Operand<LAYERS[L].features>>& operand, const Weights& weights,
                                      int block) {
#pragma unroll
    for (int step = 0; step < steps_of(LAYERS[L].outputs); ++step) {
        float low[SETS][4], high[SETS][4];
        layer_step<L>(low, high, operand, weights, block, step);
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values.set[set].at[2 * step][i] = low[set][i];
                values.set[set].at[2 * step + 1][i] = high[set][i];
            }
    }
}

template <int L>
__device__ __forceinline__ void normalized_operand(PerSet<Operand<LAYERS[L].features>>& operand,
                                                   PerSet<Values<LAYERS[L].features>>& values, int member) {
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        if (LAYERS[L].norm) normalize(values.set[set], LAYERS[L].epsilon, member);
        to_operand(operand.set[set], values.set[set]);
    }
}

// ------------------------------------------------------------------ in, mid, out

using Narrow = PerSet<Values<LAYERS[REDUCE].outputs>>;

// sums += one k-step of the first layer that reads the whole row.
__device__ __forceinline__ void reduce_step(Narrow& sums, const Step<Element> (&operand)[SETS], const Weights& weights,
                                            int block, int step) {
#pragma unroll
    for (int out = 0; out < steps_of(LAYERS[REDUCE].outputs); ++out) {
        const Fragment<Element> fragment(weights.fragment<REDUCE>(block, step, out));
#pragma unroll
        for (int set = 0; set < SETS; ++set)
            operand[set].multiply(sums.set[set].at[2 * out], sums.set[set].at[2 * out + 1], fragment);
    }
}

__device__ __forceinline__ void encode_block(Narrow& sums, const PerSet<Raw<IN>>& raw, const Weights& weights,
                                             int block, int piece) {
    PerSet<Operand<IN>> operand;
    PerSet<Values<IN>> values;
#pragma unroll
    for (int set = 0; set < SETS; ++set) widen(values.set[set], raw.set[set]);
    normalized_operand<0>(operand, values, weights.lane % 4);
    constexpr int STEPS = HAS_ENCODER ? steps_of(LAYERS[0].outputs) / PIECES : steps_of(IN);
    constexpr int TOGETHER = HAS_ENCODER ? UNROLL : STEPS;  // register indices must be compile-time constants
#pragma unroll TOGETHER
    for (int i = 0; i < STEPS; ++i) {
        const int step = HAS_ENCODER ? piece * STEPS + i : i;
        Step<Element> encoded[SETS];
        if constexpr (HAS_ENCODER) {
            float low[SETS][4], high[SETS][4];
            layer_step<0>(low, high, operand, weights, 0, step);
#pragma unroll
            for (int set = 0; set < SETS; ++set) encoded[set].set(low[set], high[set]);
        } else {
#pragma unroll
            for (int set = 0; set < SETS; ++set) encoded[set] = operand.set[set].at[i];
        }
        reduce_step(sums, encoded, weights, block, step);
    }
}

// Tensor cores truncate when they accumulate: in fp32 a block has separate accumulators, added in fp32.
__device__ __forceinline__ void add_block(Narrow& sums, const PerSet<Raw<IN>>& raw, const Weights& weights, int block,
                                          int piece) {
    if constexpr (sizeof(Element) == 4) {
        Narrow own{};
        encode_block(own, raw, weights, block, piece);
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int tile = 0; tile < 2 * steps_of(LAYERS[REDUCE].outputs); ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums.set[set].at[tile][i] += own.set[set].at[tile][i];
    } else {
        encode_block(sums, raw, weights, block, piece);
    }
}

// The narrow layers, from L to the last.
template <int L>
__device__ __forceinline__ void middle(PerSet<Operand<LAYERS[EXPAND].features>>& last,
                                       PerSet<Values<LAYERS[L].features>>& values, const Weights& weights) {
    if constexpr (L == EXPAND) {
        normalized_operand<L>(last, values, weights.lane % 4);
    } else {
        PerSet<Operand<LAYERS[L].features>> operand;
        normalized_operand<L>(operand, values, weights.lane % 4);
        PerSet<Values<LAYERS[L].outputs>> next;
        layer<L>(next, operand, weights, 0);
        middle<L + 1>(last, next, weights);
    }
}

// A block of the result; with a layer of every group, LAST differs from EXPAND.
template <int LAST>
__device__ __forceinline__ void decode_block(PerSet<Values<OUT>>& values,
                                             const PerSet<Operand<LAYERS[EXPAND].features>>& last,
                                             const Weights& weights, int block) {
    if constexpr (LAST > EXPAND) {
        PerSet<Values<LAYERS[EXPAND].outputs>> joint;
        layer<EXPAND>(joint, last, weights, block);
        PerSet<Operand<LAYERS[EXPAND].outputs>> operand;
        normalized_operand<LAST>(operand, joint, weights.lane % 4);
        layer<LAST>(values, operand, weights, 0);
    } else {
        layer<LAST>(values, last, weights, block);
    }
}

// Synchronization of warps that share rows. In a cluster the CTAs write their sums, synchronize, and read each other's.
// Before a CTA writes again, or exits, all must have read; it waits for that as late as possible.
struct RowSync {
    bool readers_pending = false;

    __device__ __forceinline__ void before_writing() {
#if CLUSTER > 1
        if (readers_pending) cluster_wait();
        readers_pending = false;
#endif
    }
    __device__ __forceinline__ void written() {
#if CLUSTER > 1
        cluster_sync();
#else
        __syncthreads();
#endif
    }
    __device__ __forceinline__ void read() {
#if CLUSTER > 1
        cluster_arrive();
        readers_pending = true;
#endif
    }
};

// Loads what a warp of CTA `rank` has written there.
__device__ __forceinline__ float4 load_exchanged(const float4* from, int rank) {
#if CLUSTER > 1
    return load_cluster(shared_address(from), rank);
#else
    return *from;
#endif
}

// Adds the warps' sums in order, so that every warp has the total: each thread reduces its share. In a cluster every
// CTA does so for itself.
template <int COLUMNS>
__device__ __forceinline__ void add_up(Values<COLUMNS>& sums, float4* exchange, RowSync& sync, int warp, int lane) {
    constexpr int SHARES = 2 * steps_of(COLUMNS) * 32;
    float4* total = exchange + TILE_WARPS * 2 * steps_of(LAYERS[REDUCE].outputs) * 32;
    sync.before_writing();
#pragma unroll
    for (int tile = 0; tile < SHARES / 32; ++tile)
        exchange[warp * SHARES + tile * 32 + lane] =
            make_float4(sums.at[tile][0], sums.at[tile][1], sums.at[tile][2], sums.at[tile][3]);
    sync.written();
    for (int share = threadIdx.x; share < SHARES; share += WARPS * 32) {
        float4 sum = load_exchanged(exchange + share, 0);
#pragma unroll
        for (int part = 1; part < PARTS; ++part) {
            const float4 more = load_exchanged(exchange + part % TILE_WARPS * SHARES + share, part / TILE_WARPS);
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        total[share] = sum;
    }
    sync.read();
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < SHARES / 32; ++tile) {
        const float4 sum = total[tile * 32 + lane];
        sums.at[tile][0] = sum.x, sums.at[tile][1] = sum.y, sums.at[tile][2] = sum.z, sums.at[tile][3] = sum.w;
    }
}

// Adds the squared distances of a block from x to those of each row.
__device__ __forceinline__ void add_squares(float (&squares)[2], const Values<OUT>& values, const Element* x,
                                            long long row, long long rows, int block, int member) {
    Raw<OUT> raw;
    Values<OUT> wanted;
    load<OUT, WIDTH_OUT, VECTOR_OUT>(raw, x, row, rows, block * OUT, member);
    widen(wanted, raw);
#pragma unroll
    for (int tile = 0; tile < 2 * steps_of(OUT); ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = column_of(OUT, tile / 2, member, tile % 2 * 2 + i % 2);
            const float distance = values.at[tile][i] - wanted.at[tile][i];
            if (is_there<OUT, WIDTH_OUT>(block * OUT, column)) squares[i / 2] += distance * distance;
        }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    mlp_tensor_core(const Element* x, const uint4* packed, Output* y, long long rows) {
    extern __shared__ __align__(16) unsigned char shared[];
    wait_for_previous_launch();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, member = lane % 4;
#if CLUSTER > 1
    const int part = cluster_rank() * TILE_WARPS + warp;
#else
    const int part = warp % TILE_WARPS;
#endif
    uint4* staged = reinterpret_cast<uint4*>(shared);
    float4* exchange = reinterpret_cast<float4*>(shared + (WEIGHTS_IN_SHARED ? PACKED_BYTES : 0));
    const long long tiles_at_once = 1LL * (gridDim.x / CLUSTER) * TILES;
    long long tile = 1LL * (blockIdx.x / CLUSTER) * TILES + warp / TILE_WARPS;
    const auto row_of = [&](long long number, int set) { return number * TILE_ROWS + set * SET_ROWS + lane / 4; };
    const auto load_block = [&](PerSet<Raw<IN>>& raw, long long number, int block) {
#pragma unroll
        for (int set = 0; set < SETS; ++set)
            load<IN, WIDTH_IN, VECTOR_IN>(raw.set[set], x, row_of(number, set), rows, block * IN, member);
    };

    // Software pipeline: a block of x is loaded while the previous one is processed, the first of a tile during the
    // last of the previous tile, and the very first while the weights arrive.
    PerSet<Raw<IN>> next;
    load_block(next, tile, part / PIECES);
    // The weights of the input side are copied first, with all biases; the others may arrive while those are used.
    constexpr int WAY_IN = WEIGHTS_IN_SHARED ? LAYERS[REDUCE + 1].weights * FRAGMENT : 0;
    constexpr int BIASES = FRAGMENTS * FRAGMENT, ALL = WEIGHTS_IN_SHARED ? PACKED_BYTES / 16 : 0;
    const auto copy = [&](int from, int to) {
        for (int i = from + threadIdx.x; i < to; i += WARPS * 32)
            copy_async_16(shared_address(staged + i), packed + i, true);
    };
    copy(0, WAY_IN);
    copy(WEIGHTS_IN_SHARED ? BIASES : 0, ALL);
    copy_async_commit();
    copy(WAY_IN, WEIGHTS_IN_SHARED ? BIASES : 0);
    copy_async_commit();
    copy_async_wait<PARTS == 1 ? 0 : 1>();
    __syncthreads();
    const uint4* fragments = WEIGHTS_IN_SHARED ? staged : packed;
    const Weights weights{fragments, reinterpret_cast<const float4*>(fragments + FRAGMENTS * FRAGMENT), lane};

    RowSync sync;
    for (; tile * TILE_ROWS < rows; tile += tiles_at_once) {
        Narrow sums;
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int step = 0; step < steps_of(LAYERS[REDUCE].outputs); ++step) {
                Values<LAYERS[REDUCE].outputs>& own = sums.set[set];
                begin(own.at[2 * step], own.at[2 * step + 1], weights.bias<REDUCE>(0, step), member);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (part) own.at[2 * step][i] = own.at[2 * step + 1][i] = 0.f;
            }
#pragma unroll 1
        for (int piece = part; piece < BLOCKS_IN * PIECES; piece += PARTS) {
            const PerSet<Raw<IN>> raw = next;
            const bool last = piece + PARTS >= BLOCKS_IN * PIECES;
            load_block(next, last ? tile + tiles_at_once : tile, (last ? part : piece + PARTS) / PIECES);
            add_block(sums, raw, weights, piece / PIECES, piece % PIECES);
        }
        if constexpr (PARTS > 1) {
            copy_async_wait<0>();  // the other weights; the synchronization below makes them visible to all
            add_up(sums.set[0], exchange, sync, warp, lane);
        }
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int step = 0; step < steps_of(LAYERS[REDUCE].outputs); ++step)
                activate<LAYERS[REDUCE].activation>(sums.set[set].at[2 * step], sums.set[set].at[2 * step + 1]);
        PerSet<Operand<LAYERS[EXPAND].features>> last;
        middle<REDUCE + 1>(last, sums, weights);

        float squares[SETS][2] = {};
#pragma unroll 1
        for (int block = part; block < BLOCKS_OUT; block += PARTS) {
            PerSet<Values<OUT>> values;
            decode_block<COUNT - 1>(values, last, weights, block);
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                const long long row = row_of(tile, set);
                if constexpr (ERROR)
                    add_squares(squares[set], values.set[set], x, row, rows, block, member);
                else
                    store<OUT, WIDTH_OUT, VECTOR_OUT>(values.set[set], reinterpret_cast<Element*>(y), row, rows,
                                                      block * OUT, member);
            }
        }
        if constexpr (ERROR) {
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                Values<1> total;  // squares of the two rows, in a form that `add_up` takes
#pragma unroll
                for (int i = 0; i < 4; ++i) total.at[0][i] = squares[set][i / 2], total.at[1][i] = 0.f;
                if constexpr (PARTS > 1) add_up(total, exchange, sync, warp, lane);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const long long row = row_of(tile, set) + 8 * r;
                    const float sum = quad_sum(total.at[0][2 * r]);
                    if (part == 0 && member == 0 && row < rows) y[row] = sum * (1.f / WIDTH_OUT);
                }
            }
        }
    }
    sync.before_writing();
}
