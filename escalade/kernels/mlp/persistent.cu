// y[item] = the last layer of (... the first layer of x[item]), or the mean squared distance of that from x[item]
//
// Persistent CTAs copy the weights to smem once, as fp32, and loop over items. The TEAMS of a CTA share only the
// weights: while one waits for its items or at its own barrier, the others multiply. A team takes TEAM_ITEMS items at a
// time; their groups are the rows of one GEMM per layer. A thread accumulates `rows` x `outputs` in registers, so that
// a weight read from smem serves as many items as an activation serves outputs. If that gives fewer tiles than threads,
// `splits` lanes share a tile, each with every splits-th four of k, and reduce by shuffles. A layer whose outputs are
// all in registers at once overwrites its own input.
// Limiter: FFMA if tiles are large, otherwise the smem reads between them.
//
// Rung: `persistent`. Read chain.cuh (layers), then activation.cuh.
#include "common/hopper.cuh"
#include "common/warp.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
using Result = float;                 // "fp32" if problem.output == "error" else problem.dtype
constexpr bool ERROR = false;         // problem.output == "error"
constexpr int UNROLL = 2;             // config.unroll: steps of the product loops
constexpr int TEAMS = 1;              // config.teams: per CTA
constexpr int TEAM_THREADS = 128;     // config.threads
constexpr int TEAM_ITEMS = 2;         // config.items: rows per team at a time
constexpr int TEAM_FLOATS = 656;      // plan.team_floats
constexpr int STAGED_FLOATS = 35168;  // plan.staged_floats
constexpr int RESULT_PITCH = 328;     // plan.result_pitch
constexpr int VECTOR_IN = 4;          // vector_in
constexpr int VECTOR_OUT = 4;         // vector_out
#endif

#include "mlp/activation.cuh"
#include "mlp/chain.cuh"

struct SmemLayout {
    int rows, outputs, splits;             // of a tile
    int input_at, input_pitch, output_at;  // in the team's smem, and between items
    int weight_at, weight_pitch;           // in the CTA's smem; -1: read from global memory
    int bias_at, norm_at;
};
constexpr SmemLayout LAYOUTS[] = {PLACE_LIST};
using Four = Pack<float, 4>;

// ------------------------------------------------------------------ smem layout

// Offset of feature f of an item's input to layer L, or of the result. Groups are aligned to 16 bytes.
template <int L>
__device__ __forceinline__ int position(int item, int f) {
    if constexpr (L == COUNT) {
        return LAYOUTS[LAST].output_at + item * RESULT_PITCH + f;
    } else {
        constexpr int FEATURES_IN = LAYERS[L].features, PADDED = (FEATURES_IN + 3) / 4 * 4;
        const int inside = FEATURES_IN == PADDED ? f : f / FEATURES_IN * PADDED + f % FEATURES_IN;
        return LAYOUTS[L].input_at + item * LAYOUTS[L].input_pitch + inside;
    }
}

// Offset of row m of a layer's GEMM: the first groups of all items, then the second ones.
template <int L>
__device__ __forceinline__ int row_position(int m) {
    return position<L>(m % TEAM_ITEMS, m / TEAM_ITEMS * LAYERS[L].features);
}

template <int L>
struct Weights {
    static constexpr bool STAGED = LAYOUTS[L].weight_at >= 0;
    static constexpr int PITCH = STAGED ? LAYOUTS[L].weight_pitch : LAYERS[L].features;

    template <class Parameters>
    static __device__ __forceinline__ auto weight(const float* staged, const Parameters& parameters) {
        if constexpr (STAGED) return staged + LAYOUTS[L].weight_at;
        else return parameters[Of<L>::weight];
    }
    template <class Parameters>
    static __device__ __forceinline__ auto bias(const float* staged, const Parameters& parameters) {
        if constexpr (STAGED) return staged + LAYOUTS[L].bias_at;
        else return parameters[Of<L>::bias];
    }
    template <class Parameters>
    static __device__ __forceinline__ auto norm(const float* staged, const Parameters& parameters, int which) {
        if constexpr (STAGED) return staged + LAYOUTS[L].norm_at + which * ((LAYERS[L].features + 3) / 4 * 4);
        else return parameters[Of<L>::norm_weight + which];
    }
};

// Four adjacent values: 16 bytes from smem; from global memory in one load if rows are aligned to fours.
template <bool ALIGNED, class T>
__device__ __forceinline__ Four four(const T* from) {
    Four values;
    if constexpr (ALIGNED) {
        const Pack<T, 4> pack = load_pack<T, 4>(from);
#pragma unroll
        for (int e = 0; e < 4; ++e) values.at[e] = to_float(pack.at[e]);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) values.at[e] = to_float(from[e]);
    }
    return values;
}

__device__ __forceinline__ void team_barrier(int team) {
    if constexpr (TEAMS == 1) __syncthreads();
    else named_barrier_sync(1 + team, TEAM_THREADS);
}

// ------------------------------------------------------------------ staging

__device__ __forceinline__ void stage_vector(float* target, const Element* from, int count) {
    for (int at = threadIdx.x; at < count; at += TEAMS * TEAM_THREADS) target[at] = to_float(from[at]);
}

// Called by all threads of the CTA. fp32 by cp.async, waited for together with the first items.
template <int L, class Parameters>
__device__ __forceinline__ void stage(float* staged, const Parameters& parameters) {
    constexpr Layer layer = LAYERS[L];
    constexpr SmemLayout layout = LAYOUTS[L];
    if constexpr (Weights<L>::STAGED) {
        constexpr int VECTOR = layer.vector, PACKS = layer.outputs * layer.features / VECTOR;
        const Element* weight = parameters[Of<L>::weight];
#pragma unroll 8
        for (int pack = threadIdx.x; pack < PACKS; pack += TEAMS * TEAM_THREADS) {
            const int at = pack * VECTOR;
            float* target = staged + layout.weight_at + at / layer.features * layout.weight_pitch + at % layer.features;
            if constexpr (sizeof(Element) == 4 && VECTOR == 4) {
                copy_async_16(shared_address(target), weight + at, true);
            } else {
                const Pack<Element, VECTOR> values = load_pack<Element, VECTOR>(weight + at);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) target[e] = to_float(values.at[e]);
            }
        }
        if constexpr (layer.bias) stage_vector(staged + layout.bias_at, parameters[Of<L>::bias], layer.outputs);
        if constexpr (layer.norm) {
            constexpr int PADDED = (layer.features + 3) / 4 * 4;
            stage_vector(staged + layout.norm_at, parameters[Of<L>::norm_weight], layer.features);
            stage_vector(staged + layout.norm_at + PADDED, parameters[Of<L>::norm_bias], layer.features);
        }
    }
    if constexpr (L < LAST) stage<L + 1>(staged, parameters);
}

// ------------------------------------------------------------------ items in and out

// Zeros for items past the last.
__device__ __forceinline__ void load_items(float* space, const Element* x, int present, int thread) {
#pragma unroll 4
    for (int at = thread * VECTOR_IN; at < TEAM_ITEMS * FEATURES; at += TEAM_THREADS * VECTOR_IN) {
        const int item = at / FEATURES;
        float* target = space + position<0>(item, at % FEATURES);
        if constexpr (sizeof(Element) == 4 && VECTOR_IN == 4) {
            copy_async_16(shared_address(target), x + at, item < present);
        } else {
            Pack<Element, VECTOR_IN> pack{};
            if (item < present) pack = load_pack<Element, VECTOR_IN>(x + at);
            constexpr int FOURS = VECTOR_IN < 4 ? VECTOR_IN : 4;
#pragma unroll
            for (int first = 0; first < VECTOR_IN; first += FOURS) {
                Pack<float, FOURS> values;
#pragma unroll
                for (int e = 0; e < FOURS; ++e) values.at[e] = to_float(pack.at[first + e]);
                store_pack(target + first, values);
            }
        }
    }
}

__device__ __forceinline__ void store_results(Result* y, const float* space, int present, int thread) {
#pragma unroll 4
    for (int at = thread * VECTOR_OUT; at < present * OUTPUTS; at += TEAM_THREADS * VECTOR_OUT) {
        const float* from = space + position<COUNT>(at / OUTPUTS, at % OUTPUTS);
        constexpr int FOURS = VECTOR_OUT < 4 ? VECTOR_OUT : 4;
        Pack<Result, VECTOR_OUT> pack;
#pragma unroll
        for (int first = 0; first < VECTOR_OUT; first += FOURS) {
            const Pack<float, FOURS> values = load_pack<float, FOURS>(from + first);
#pragma unroll
            for (int e = 0; e < FOURS; ++e) pack.at[first + e] = from_float<Result>(values.at[e]);
        }
        store_pack(y + at, pack);
    }
}

// One warp per item; x is read once more, from L2.
__device__ __forceinline__ void store_errors(Result* y, const float* space, const Element* x, int present, int thread) {
    for (int item = thread / 32; item < present; item += TEAM_THREADS / 32) {
        float squares = 0.f;
#pragma unroll 4
        for (int at = thread % 32 * VECTOR_IN; at < FEATURES; at += 32 * VECTOR_IN) {
            const Pack<Element, VECTOR_IN> pack = load_pack<Element, VECTOR_IN>(x + item * FEATURES + at);
#pragma unroll
            for (int e = 0; e < VECTOR_IN; ++e) {
                const float distance = space[position<COUNT>(item, at + e)] - to_float(pack.at[e]);
                squares += distance * distance;
            }
        }
        squares = warp_sum(squares);
        if (thread % 32 == 0) y[item] = from_float<Result>(squares / FEATURES);
    }
}

// ------------------------------------------------------------------ norms

template <int LANES>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// Normalizes every row in place: LANES lanes keep their fours of it in registers.
template <int L, int LANES, class Scale>
__device__ __forceinline__ void normalize_fours(float* space, const Scale* weight, const Scale* bias, int thread) {
    constexpr Layer layer = LAYERS[L];
    constexpr int ROWS = TEAM_ITEMS * layer.groups, FOURS = layer.features / 4, EACH = (FOURS + LANES - 1) / LANES;
    const int lane = thread % LANES;
    Four scale[EACH], shift[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = min(lane + i * LANES, FOURS - 1) * 4;
        scale[i] = four<true>(weight + at);
        shift[i] = four<true>(bias + at);
    }
#pragma unroll 2
    for (int first = 0; first < ROWS; first += TEAM_THREADS / LANES) {
        const int m = first + thread / LANES;
        const bool present = ROWS % (TEAM_THREADS / LANES) == 0 || m < ROWS;
        float* row = space + row_position<L>(m);
        Four values[EACH];
        float sum = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            values[i] = Four{};
            if (present && lane + i * LANES < FOURS) values[i] = load_pack<float, 4>(row + (lane + i * LANES) * 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum += values[i].at[e];
        }
        const float mean = lanes_sum<LANES>(sum) / layer.features;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                values[i].at[e] -= mean;
                squares += lane + i * LANES < FOURS ? values[i].at[e] * values[i].at[e] : 0.f;
            }
        const float over = rsqrtf(lanes_sum<LANES>(squares) / layer.features + layer.epsilon);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) values[i].at[e] = values[i].at[e] * over * scale[i].at[e] + shift[i].at[e];
            if (present && lane + i * LANES < FOURS) store_pack(row + (lane + i * LANES) * 4, values[i]);
        }
    }
}

// Normalizes rows of any length, one warp per row.
template <int L, class Scale>
__device__ __forceinline__ void normalize_any(float* space, const Scale* weight, const Scale* bias, int thread) {
    constexpr Layer layer = LAYERS[L];
    const int lane = thread % 32;
    for (int m = thread / 32; m < TEAM_ITEMS * layer.groups; m += TEAM_THREADS / 32) {
        float* row = space + row_position<L>(m);
        float sum = 0.f, squares = 0.f;
        for (int f = lane; f < layer.features; f += 32) sum += row[f];
        const float mean = warp_sum(sum) / layer.features;
        for (int f = lane; f < layer.features; f += 32) squares += (row[f] - mean) * (row[f] - mean);
        const float over = rsqrtf(warp_sum(squares) / layer.features + layer.epsilon);
        for (int f = lane; f < layer.features; f += 32)
            row[f] = (row[f] - mean) * over * to_float(weight[f]) + to_float(bias[f]);
    }
}

template <int L, class Parameters>
__device__ __forceinline__ void normalize(float* space, const float* staged, const Parameters& parameters, int thread) {
    constexpr int FEATURES_IN = LAYERS[L].features, LANES = FEATURES_IN > 128 ? 32 : FEATURES_IN > 32 ? 8 : 4;
    const auto weight = Weights<L>::norm(staged, parameters, 0), bias = Weights<L>::norm(staged, parameters, 1);
    if constexpr (FEATURES_IN % 4 == 0 && FEATURES_IN <= 512) normalize_fours<L, LANES>(space, weight, bias, thread);
    else normalize_any<L>(space, weight, bias, thread);
}

// ------------------------------------------------------------------ products

// Reduce-scatter over SPLITS adjacent lanes: lane s keeps the sums from s * COUNT / SPLITS on, moved to the front.
template <int COUNT_, int DISTANCE>
__device__ __forceinline__ void scatter_sums(float* values) {
    if constexpr (DISTANCE > 0) {
        const bool upper = threadIdx.x & DISTANCE;
#pragma unroll
        for (int i = 0; i < COUNT_ / 2; ++i) {
            const float given = upper ? values[i] : values[i + COUNT_ / 2];
            values[i] = (upper ? values[i + COUNT_ / 2] : values[i]) + __shfl_xor_sync(ALL_LANES, given, DISTANCE);
        }
        scatter_sums<COUNT_ / 2, DISTANCE / 2>(values);
    }
}

template <int L>
struct Product {
    static constexpr Layer layer = LAYERS[L];
    static constexpr SmemLayout layout = LAYOUTS[L];
    static constexpr int ROWS = TEAM_ITEMS * layer.groups, FOURS = layer.features / 4;
    static constexpr int ROW_TILES = (ROWS + layout.rows - 1) / layout.rows;
    static constexpr int OUTPUT_TILES = (layer.outputs + layout.outputs - 1) / layout.outputs;
    static constexpr int UNITS = ROW_TILES * OUTPUT_TILES * layout.splits;
    static constexpr int PASSES = (UNITS + TEAM_THREADS - 1) / TEAM_THREADS;
    static constexpr int SUMS = layout.rows * layout.outputs, EACH = SUMS / layout.splits;

    int row_tile, output_tile, split;
    bool inside;
    float sums[SUMS];

    // Adjacent threads share a tile, then a row of tiles. Threads past the last tile repeat it.
    __device__ __forceinline__ explicit Product(int unit) {
        const int tile = min(unit / layout.splits, ROW_TILES * OUTPUT_TILES - 1);
        split = layout.splits == 1 ? 0 : unit % layout.splits;
        row_tile = tile / OUTPUT_TILES;
        output_tile = tile % OUTPUT_TILES;
        inside = UNITS % TEAM_THREADS == 0 || unit < UNITS;
    }

    // A thread's rows and outputs are as far apart as the number of tiles, so that adjacent threads' are contiguous.
    // Past the last, repeats it.
    __device__ __forceinline__ int row_of(int r) const {
        const int m = r * ROW_TILES + row_tile;
        return ROWS % layout.rows == 0 ? m : min(m, ROWS - 1);
    }
    __device__ __forceinline__ int output_of(int o) const {
        const int n = o * OUTPUT_TILES + output_tile;
        return layer.outputs % layout.outputs == 0 ? n : min(n, layer.outputs - 1);
    }

    // Rows at a compile-time distance need no register each.
    __device__ __forceinline__ int row_at(int r) const {
        if constexpr (ROWS % layout.rows == 0 && TEAM_ITEMS % ROW_TILES == 0)
            return row_position<L>(r * ROW_TILES) + row_tile * layout.input_pitch;
        else if constexpr (ROWS % layout.rows == 0 && ROW_TILES % TEAM_ITEMS == 0)
            return row_position<L>(row_tile) + r * (ROW_TILES / TEAM_ITEMS) * ((layer.features + 3) / 4 * 4);
        else
            return row_position<L>(row_of(r));
    }

    template <class Weight>
    __device__ __forceinline__ void multiply(const float* space, const Weight* weight) {
        constexpr bool ALIGNED = Weights<L>::STAGED || layer.features % 4 == 0;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;
#pragma unroll(UNROLL)
        for (int k = split; k < FOURS; k += layout.splits) {
            Four weights[layout.outputs];
#pragma unroll
            for (int o = 0; o < layout.outputs; ++o)
                weights[o] = four<ALIGNED>(weight + output_of(o) * Weights<L>::PITCH + k * 4);
#pragma unroll
            for (int r = 0; r < layout.rows; ++r) {
                const Four values = load_pack<float, 4>(space + row_at(r) + k * 4);
#pragma unroll
                for (int e = 0; e < 4; ++e)
#pragma unroll
                    for (int o = 0; o < layout.outputs; ++o)
                        sums[r * layout.outputs + o] += values.at[e] * weights[o].at[e];
            }
        }
        if (layer.features % 4 != 0 && split == 0)
            for (int k = FOURS * 4; k < layer.features; ++k)
#pragma unroll
                for (int i = 0; i < SUMS; ++i)
                    sums[i] += space[row_at(i / layout.outputs) + k] *
                               to_float(weight[output_of(i % layout.outputs) * Weights<L>::PITCH + k]);
        scatter_sums<SUMS, layout.splits / 2>(sums);
    }

    template <class Bias>
    __device__ __forceinline__ void store(float* space, const Bias* bias) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int r = (split * EACH + i) / layout.outputs, o = (split * EACH + i) % layout.outputs;
            const int m = r * ROW_TILES + row_tile, n = o * OUTPUT_TILES + output_tile;
            float sum = sums[i];
            if constexpr (layer.bias) sum += to_float(bias[output_of(o)]);
            sum = activate<layer.activation>(sum);
            if (inside && (ROWS % layout.rows == 0 || m < ROWS) &&
                (layer.outputs % layout.outputs == 0 || n < layer.outputs))
                space[position<L + 1>(m % TEAM_ITEMS, m / TEAM_ITEMS * layer.outputs + n)] = sum;
        }
    }
};

template <int L, class Parameters>
__device__ __forceinline__ void run(float* space, const float* staged, const Parameters& parameters, int team,
                                    int same_thread) {
    // else the addresses of all layers would take registers from the accumulators
    const int thread = anew(same_thread);
    if constexpr (LAYERS[L].norm) {
        normalize<L>(space, staged, parameters, thread);
        team_barrier(team);
    }
    const auto weight = Weights<L>::weight(staged, parameters);
    constexpr bool IN_PLACE = LAYOUTS[L].input_at == LAYOUTS[L].output_at;
    static_assert(!IN_PLACE || Product<L>::PASSES == 1, "outputs would overwrite inputs that are still needed");
#pragma unroll 1
    for (int pass = 0; pass < Product<L>::PASSES; ++pass) {
        Product<L> tile(pass * TEAM_THREADS + thread);
        tile.multiply(space, weight);
        if constexpr (IN_PLACE) team_barrier(team);
        if constexpr (LAYERS[L].bias)
            tile.store(space, Weights<L>::bias(staged, parameters));
        else
            tile.store(space, static_cast<const float*>(nullptr));
    }
    team_barrier(team);
    if constexpr (L < LAST) run<L + 1>(space, staged, parameters, team, thread);
}

extern "C" __global__ void __launch_bounds__(TEAMS* TEAM_THREADS, 1)
    mlp_persistent(const Element* x, Result* y, int batch, int weights_ready, PARAMETER_LIST) {
    extern __shared__ __align__(16) float shared[];
    const Element* const parameters[] = {PARAMETER_NAMES};
    const int team = threadIdx.x / TEAM_THREADS, thread = threadIdx.x % TEAM_THREADS;
    float* staged = shared_part(shared, STAGED_FLOATS);
    float* space = shared_part(shared + STAGED_FLOATS + team * TEAM_FLOATS, TEAM_FLOATS);
    if (!weights_ready) wait_for_previous_launch();
    stage<0>(staged, parameters);
    wait_for_previous_launch();  // returns at once if already waited for

    const int tiles = (batch - 1) / TEAM_ITEMS + 1;
    bool staging = true;
    for (int tile = blockIdx.x * TEAMS + team; tile < tiles || staging; tile += gridDim.x * TEAMS) {
        const int present = max(0, min(TEAM_ITEMS, batch - min(tile, tiles) * TEAM_ITEMS));
        const long long first = 1LL * tile * TEAM_ITEMS;
        load_items(space, x + first * FEATURES, present, thread);
        copy_async_commit();
        copy_async_wait<0>();
        if (staging) __syncthreads();
        else team_barrier(team);
        staging = false;
        run<0>(space, staged, parameters, team, thread);
        if constexpr (ERROR)
            store_errors(y + first, space, x + first * FEATURES, present, thread);
        else
            store_results(y + first * OUTPUTS, space, present, thread);
        team_barrier(team);  // before the next items overwrite these
    }
}
