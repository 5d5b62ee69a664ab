// y[pixel][filter] = relu(sum over k of input[pixel][k] * weight[filter][k] + bias[filter] + residual[pixel][filter])
//
// Implicit GEMM on mma.sync: cp.async runs STAGES - 1 k-tiles ahead, fragments are double-buffered, and the epilogue is
// fused. Each warp transposes its accumulators through smem, 16 rows at a time, so that bias and residual are read and
// y is written 16 bytes per lane, whole lines per row.
//   SHORTCUT     a 1x1 convolution of a second image joins the sum: its channels extend k
//   SPLITS       CTAs per output tile; each sums a part of k and stores it to `parts`; the last to finish, by the count
//                in `tickets`, adds all parts in order and runs the epilogue
//   PRODUCTS     3: fp32 accuracy, operands split into two TF32 parts, the smallest of the four products is omitted;
//                tensor cores round toward zero, so the sums of a k-tile are promoted to fp32 accumulators
//   GROUPED      the shape's channels and filters are those of one group, and a tile belongs to one group
//   e4m3 operands (FP8)  sums, bias, residual and result have scales of their own: see finish_scaled
// Limiter: the mma.sync rate, about 62% of wgmma's on Hopper; with few CTAs, latency.
//
// Rung                 switches
//   fused_epilogue     PRODUCTS 1, Element as x is stored
//   tensor_core_split  PRODUCTS 3, Element float
// conv2d_input_gradient and linear launch it through those rungs.
#include "common/conv_tiles.cuh"
#include "common/epilogue.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Output = float;                   // problem.stored
using Bias = float;                     // "fp32" if problem.dtype == "fp8" else problem.stored
constexpr int STAGES = 5;               // config.stages
constexpr int BLOCKS_PER_SM = 4;        // config.blocks_per_sm
constexpr int SPLITS = 1;               // config.splits: CTAs that share one sum
constexpr int PRODUCTS = 1;             // products: 3 if operands are split into two TF32 parts
constexpr int Y_PITCH = 0;              // problem.y_pitch
constexpr bool FILTERS_ALIGNED = true;  // problem.group_filters * problem.element_bytes % 16 == 0
constexpr bool HAS_BIAS = false;        // problem.bias
constexpr bool HAS_RESIDUAL = false;    // problem.residual
constexpr bool HAS_RELU = false;        // problem.relu
constexpr int WARPS_M = 2;              // config.warps_m
constexpr int WARPS_N = 2;              // config.warps_n
#endif

constexpr int THREADS = WARPS_M * WARPS_N * 32;
constexpr int WARP_M = TILE_M / WARPS_M;
constexpr int WARP_N = TILE_N / WARPS_N;
constexpr int BLOCKS_M = WARP_M / 16;
constexpr int BLOCKS_N = WARP_N / 8;
using Copier = TileCopier<TILE_M, TILE_N, TILE_K, THREADS>;
constexpr int ROW_BYTES = Copier::ROW_BYTES;
constexpr int STEPS = ROW_BYTES / STEP_BYTES;
static_assert(STEPS % 2 == 0, "fragments alternate between two sets of registers");

using Accumulators = float[BLOCKS_M][BLOCKS_N][4];

__device__ __forceinline__ void add(Accumulators& acc, const Accumulators& more) {
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i)
#pragma unroll
        for (int j = 0; j < BLOCKS_N; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[i][j][e] += more[i][j][e];
}

constexpr int PART = BLOCKS_M * BLOCKS_N * THREADS;               // float4s per tile; a warp's are contiguous
constexpr int PARTS_AT_ONCE = BLOCKS_N >= 8 ? 1 : 16 / BLOCKS_N;  // loads in flight per thread

// Stores this CTA's partial sums. True in the CTA that finishes its tile last: it sees all parts.
__device__ __forceinline__ bool store_part(const Accumulators& acc, float4* parts, u32* tickets) {
    float4* const own = parts + (1LL * blockIdx.y * gridDim.x + blockIdx.x) * PART + threadIdx.x;
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i)
#pragma unroll
        for (int j = 0; j < BLOCKS_N; ++j) {
            const float (&four)[4] = acc[i][j];
            __stcg(own + (i * BLOCKS_N + j) * THREADS, make_float4(four[0], four[1], four[2], four[3]));
        }
    __syncthreads();
    const bool last = threadIdx.x == 0 && take_ticket(tickets + blockIdx.x, SPLITS) == SPLITS - 1;
    return __syncthreads_or(last);
}

// Sum of all parts, in part order.
__device__ __forceinline__ void add_parts(Accumulators& acc, const float4* parts) {
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i) {
        const float4* part = parts + 1LL * blockIdx.x * PART + i * BLOCKS_N * THREADS + threadIdx.x;
#pragma unroll PARTS_AT_ONCE
        for (int number = 0; number < SPLITS; ++number, part += 1LL * gridDim.x * PART)
#pragma unroll
            for (int j = 0; j < BLOCKS_N; ++j) {
                const float4 more = __ldcg(part + j * THREADS);
                float (&four)[4] = acc[i][j];
                four[0] = number ? four[0] + more.x : more.x;
                four[1] = number ? four[1] + more.y : more.y;
                four[2] = number ? four[2] + more.z : more.z;
                four[3] = number ? four[3] + more.w : more.w;
            }
    }
}

// Staging rows of a warp's accumulators. Eight floats of padding put the four rows that half a warp writes at once into
// different banks.
constexpr int STAGED_ROWS = 16;
constexpr int STAGED_PITCH = WARP_N + 8;
constexpr int WIDEST = 16 / sizeof(Output);
constexpr int VECTOR = WIDEST < WARP_N / 2 ? WIDEST : WARP_N / 2;
constexpr int LANES_IN_ROW = WARP_N / VECTOR;
constexpr int ROWS_IN_PASS = 32 / LANES_IN_ROW;
constexpr int PASSES = STAGED_ROWS / ROWS_IN_PASS;
static_assert(32 % LANES_IN_ROW == 0 && STAGED_ROWS % ROWS_IN_PASS == 0, "a pass takes whole rows");
using Residual = Pack<Element, VECTOR>;

// VECTOR consecutive sums. With eight (sixteen), lanes four (two) apart would conflict in a bank: they read the halves
// of eight in opposite order.
__device__ __forceinline__ void read_staged(float (&acc)[VECTOR], const float* staged, int lane_in_row) {
    if (VECTOR == 4) {
        const Pack<float, 4> four = load_pack<float, 4>(staged);
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[e] = four.at[e];
    } else {
        const bool swap = lane_in_row & 32 / VECTOR;
#pragma unroll
        for (int first = 0; first < VECTOR; first += 8) {
            const Pack<float, 4> one = load_pack<float, 4>(staged + first + (swap ? 4 : 0));
            const Pack<float, 4> other = load_pack<float, 4>(staged + first + (swap ? 0 : 4));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                acc[first + e] = swap ? other.at[e] : one.at[e];
                acc[(first + e + 4) % VECTOR] = swap ? one.at[e] : other.at[e];
            }
        }
    }
}

// VECTOR values at `address`, of which the first `count` exist.
template <class T>
__device__ __forceinline__ Pack<T, VECTOR> read_vector(const T* address, int count) {
    Pack<T, VECTOR> vector = {};
    if constexpr (FILTERS_ALIGNED) {
        if (count > 0) vector = load_pack<T, VECTOR>(address);
    } else {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            if (e < count) vector.at[e] = address[e];
    }
    return vector;
}

template <class T>
__device__ __forceinline__ void write_vector(T* address, const Pack<T, VECTOR>& vector, int count) {
    if constexpr (FILTERS_ALIGNED) {
        if (count > 0) store_pack(address, vector);
    } else {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            if (e < count) address[e] = vector.at[e];
    }
}

// A lane's share of its warp's outputs: VECTOR filters of one row per pass.
struct LaneOutputs {
    int first_row, row_in_pass, lane_in_row, filters_left;
    long long at;  // offset in y and the residual
    int pixels, filters;
    int pitch;  // filters from one pixel to the next

    __device__ __forceinline__ LaneOutputs(int warp_pixel, int warp_filter, int pixels, int filters, int pitch)
        : pixels(pixels), filters(filters), pitch(pitch) {
        const int lane = threadIdx.x % 32;
        row_in_pass = lane / LANES_IN_ROW;
        lane_in_row = lane % LANES_IN_ROW;
        first_row = warp_pixel + row_in_pass;
        const int filter = warp_filter + lane_in_row * VECTOR;
        filters_left = filters - filter;
        at = 1LL * first_row * pitch + filter;
    }

    __device__ __forceinline__ long long at_row(int row) const { return at + 1LL * row * pitch; }
    __device__ __forceinline__ int count(int row) const { return first_row + row < pixels ? filters_left : 0; }
};

using Residuals = Residual[BLOCKS_M][PASSES];
constexpr bool RESIDUALS_AT_ONCE = BLOCKS_M * PASSES <= 4;  // few enough to keep in registers beside the accumulators

__device__ __forceinline__ void read_residuals(Residual (&residuals)[PASSES], int i, const Element* residual,
                                               const LaneOutputs& lane_outputs) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int row = i * STAGED_ROWS + pass * ROWS_IN_PASS;
        residuals[pass] = read_vector(residual + lane_outputs.at_row(row), lane_outputs.count(row));
    }
}

// Epilogue of a lane's filters.
template <class Operand, class Result>
struct Finish {
    using Results = Pack<Result, VECTOR>;
    Results biases = {};

    __device__ __forceinline__ Finish(const Result* bias, const float*, const float*, const LaneOutputs& lane_outputs) {
        if (HAS_BIAS)
            biases = read_vector(bias + (lane_outputs.filters - lane_outputs.filters_left), lane_outputs.filters_left);
    }

    __device__ __forceinline__ Results operator()(const float (&acc)[VECTOR],
                                                  const Pack<Operand, VECTOR>& residual) const {
        Results results;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            results.at[e] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(acc[e], biases.at, e, residual.at, e);
        return results;
    }
};

// FP8; the filters are a multiple of 16.
template <class Result>
struct Finish<e4m3, Result> {
    using Results = Pack<Result, VECTOR>;
    float biases[VECTOR] = {}, units[VECTOR];
    float residual_scale, result_scale;

    __device__ __forceinline__ Finish(const float* bias, const float* scale, const float* scales,
                                      const LaneOutputs& lane_outputs)
        : residual_scale(scales[0]), result_scale(scales[1]) {
        read(units, scale, lane_outputs);
        if (HAS_BIAS) read(biases, bias, lane_outputs);
    }

    __device__ __forceinline__ Results operator()(float (&acc)[VECTOR], const Pack<e4m3, VECTOR>& residual) const {
        float residuals[VECTOR] = {};
        if (HAS_RESIDUAL) to_floats(residuals, residual);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            acc[e] = finish_scaled<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(acc[e], units[e], biases[e], residuals[e],
                                                                     residual_scale, result_scale);
        Results results;
        from_floats(results, acc);
        return results;
    }

private:
    __device__ __forceinline__ static void read(float (&values)[VECTOR], const float* all,
                                                const LaneOutputs& lane_outputs) {
#pragma unroll
        for (int first = 0; first < VECTOR; first += 4) {
            Pack<float, 4> four = {};
            if (lane_outputs.filters_left > 0)
                four = load_pack<float, 4>(all + (lane_outputs.filters - lane_outputs.filters_left) + first);
#pragma unroll
            for (int e = 0; e < 4; ++e) values[first + e] = four.at[e];
        }
    }
};

// Stores a warp's accumulators.
__device__ __forceinline__ void finish_warp(const Accumulators& acc, Residuals& residuals, float* staged,
                                            const LaneOutputs& lane_outputs, const Finish<Element, Output>& finished,
                                            const Element* residual, Output* y) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i) {
        // Residuals are in flight while the accumulators are staged.
        if (HAS_RESIDUAL && !RESIDUALS_AT_ONCE) read_residuals(residuals[i], i, residual, lane_outputs);
        __syncwarp();  // the previous rows have been read
#pragma unroll
        for (int j = 0; j < BLOCKS_N; ++j) {
            float* corner = staged + lane / 4 * STAGED_PITCH + j * 8 + lane % 4 * 2;
            store_pack(corner, Pack<float, 2>{acc[i][j][0], acc[i][j][1]});
            store_pack(corner + 8 * STAGED_PITCH, Pack<float, 2>{acc[i][j][2], acc[i][j][3]});
        }
        __syncwarp();
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int staged_row = pass * ROWS_IN_PASS + lane_outputs.row_in_pass;
            float values[VECTOR];
            read_staged(values, staged + staged_row * STAGED_PITCH + lane_outputs.lane_in_row * VECTOR,
                        lane_outputs.lane_in_row);
            const int row = i * STAGED_ROWS + pass * ROWS_IN_PASS;
            write_vector(y + lane_outputs.at_row(row), finished(values, residuals[i][pass]), lane_outputs.count(row));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_fused_epilogue(const Element* __restrict__ x, const Element* __restrict__ weight,
                          const Element* __restrict__ shortcut, const Element* __restrict__ shortcut_weight,
                          const Bias* __restrict__ bias, const float* __restrict__ scale,
                          const float* __restrict__ scales, const Element* __restrict__ residual,
                          Output* __restrict__ y, float4* parts, u32* tickets, ConvShape shape,
                          ShortcutShape shortcut_shape, int weights_ready, int release_dependents) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];

    // CTAs over the same pixels are adjacent, so x is read from DRAM once.
    const int group_tiles_n = (shape.filters + TILE_N - 1) / TILE_N;
    const int tiles_n = IN_GROUPS ? group_tiles_n * shape.groups : group_tiles_n;
    const int first_pixel = blockIdx.x / tiles_n * TILE_M;
    const int first_filter = blockIdx.x % group_tiles_n * TILE_N;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warp_row = warp % WARPS_M * WARP_M;
    const int warp_column = warp / WARPS_M * WARP_N;

    const int depth = FILTER_HEIGHT * FILTER_WIDTH * shape.channels;
    if (IN_GROUPS) {
        const int group = blockIdx.x % tiles_n / group_tiles_n, before = group * shape.filters;
        x += group * shape.channels, weight += 1LL * before * depth, y += before;
        if (HAS_BIAS) bias += before;
        if (HAS_RESIDUAL) residual += before;
    }
    const int shortcut_tiles = SHORTCUT ? (shortcut_shape.channels + TILE_K - 1) / TILE_K : 0;
    const int all_tiles = (depth + TILE_K - 1) / TILE_K + shortcut_tiles;
    const int split_tiles = (all_tiles + SPLITS - 1) / SPLITS;
    const int first_tile = SPLITS > 1 ? blockIdx.y * split_tiles : 0;
    const int tiles = SPLITS > 1 ? max(min(split_tiles, all_tiles - first_tile), 0) : all_tiles;

    const u32 stages = shared_address(shared_memory);
    const u32 address_a = fragment_address_a<ROW_BYTES>(stages, warp_row, lane);
    const u32 address_b = fragment_address_b<ROW_BYTES>(stages + Copier::BYTES_A, warp_column, lane);
    Copier copier(shape, x, weight, first_pixel, first_filter, first_tile * TILE_K,
                  {shortcut, shortcut_weight, shortcut_shape});

    if (weights_ready) {  // no need to wait for the previous launch (PDL); they join the first group
        Copier ahead = copier;
#pragma unroll
        for (int tile = 0; tile < STAGES - 1; ++tile) {
            ahead.copy_b(stages + tile * Copier::STAGE_BYTES, tile < tiles);
            ahead.next();
        }
    }
    wait_for_previous_launch();
    // One cp.async group per k-tile, zeros past the last, so that counting groups counts k-tiles.
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) {
        copier.copy_a(stages + tile * Copier::STAGE_BYTES, tile < tiles);
        if (!weights_ready) copier.copy_b(stages + tile * Copier::STAGE_BYTES, tile < tiles);
        copier.next();
        copy_async_commit();
    }
    copy_async_wait<STAGES - 2>();
    __syncthreads();

    Accumulators acc = {};
    Fragments<BLOCKS_M, BLOCKS_N> fragments[2];
    fragments[0].template load<ROW_BYTES>(address_a, address_b);
    u32 read_stage = 0;
    u32 write_stage = (STAGES - 1) * Copier::STAGE_BYTES;
    for (int tile = 0; tile < tiles; ++tile) {
        const bool copies = tile + STAGES - 1 < tiles;
        Accumulators k_tile_acc = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            Fragments<BLOCKS_M, BLOCKS_N>& now = fragments[step % 2];
            if (step == STEPS - 1) {
                copy_async_commit();
                copy_async_wait<STAGES - 2>();
                __syncthreads();
                write_stage = read_stage;
                read_stage = read_stage == (STAGES - 1) * Copier::STAGE_BYTES ? 0 : read_stage + Copier::STAGE_BYTES;
            }
            // Past the last k-tile this reads zeros that are never used.
            const u32 next_step = (step + 1) % STEPS * STEP_BYTES;
            fragments[(step + 1) % 2].template load<ROW_BYTES>((address_a + read_stage) ^ next_step,
                                                               (address_b + read_stage) ^ next_step);
            // The stage being written is free: its last fragments were loaded before the last barrier.
            if (step == 0) copier.copy_a(stages + write_stage, copies);
            if (step == STEPS / 2 - 1) {
                copier.copy_b(stages + write_stage, copies);
                copier.next();
            }
            if constexpr (PRODUCTS == 3) {
                multiply_add_split(k_tile_acc, now);
            } else {
                if (sizeof(Element) == 4) now.round_to_tf32();
                multiply_add<Element>(acc, now.a, now.b);
            }
        }
        if (PRODUCTS == 3) add(acc, k_tile_acc);
    }

    if (release_dependents) let_next_launch_start();
    const int pixels = shape.batch * shape.output_height * shape.output_width;
    const LaneOutputs lane_outputs(first_pixel + warp_row, first_filter + warp_column, pixels, shape.filters,
                                   Y_PITCH     ? Y_PITCH
                                   : IN_GROUPS ? shape.filters * shape.groups
                                               : shape.filters);
    Residuals residuals;
    copy_async_wait<0>();
    if (SPLITS > 1) {
        if (!store_part(acc, parts, tickets)) return;
    } else {
        __syncthreads();  // the stages become the warps' staging rows
    }
    if (HAS_RESIDUAL && RESIDUALS_AT_ONCE) {
#pragma unroll
        for (int i = 0; i < BLOCKS_M; ++i) read_residuals(residuals[i], i, residual, lane_outputs);
    }
    if (SPLITS > 1) add_parts(acc, parts);
    float* staged = reinterpret_cast<float*>(shared_memory) + warp * STAGED_ROWS * STAGED_PITCH;
    finish_warp(acc, residuals, staged, lane_outputs, {bias, scale, scales, lane_outputs}, residual, y);
}
