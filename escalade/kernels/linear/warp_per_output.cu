// y[row][output] = relu(sum over k of x[row][k] * weight[output][k] + bias[output]), for a few rows
//
// With few rows the weights are a stream that should run at memory speed. Each warp streams OUTPUTS rows of weights
// through a ring in smem, 16 bytes per lane and STAGES - 1 copies of each row ahead, without using registers; ROWS rows
// of x, which the warps of a CTA share in L1, are loaded at most one step ahead. If the outputs do not fill enough
// warps, DEPTH_WARPS warps share the same outputs, each taking every DEPTH_WARPS-th piece of k. Weights that are ready
// do not wait for the previous launch (PDL). Limiter: memory, and at a megabyte the latency of one round trip.
//
// Rungs: `warp_per_output`; `pool_first` after a mean.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr bool HAS_BIAS = true;   // problem.bias
constexpr bool HAS_RELU = false;  // problem.relu
constexpr int VECTOR = 4;         // width
constexpr int ROWS = 1;           // config.rows: rows of x per warp
constexpr int OUTPUTS = 1;        // config.outputs: output features per warp
constexpr int STAGES = 2;         // config.stages: stages of the ring, in packs of a row of weights
constexpr int BLOCKS_PER_SM = 4;  // (32 if config.rows <= 2 else 16) // warps
constexpr int OUTPUT_WARPS = 8;   // config.output_warps: warps per CTA along the outputs
constexpr int DEPTH_WARPS = 1;    // config.depth_warps: warps per CTA along k
#endif

#include "common/epilogue.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"

constexpr int WARPS = OUTPUT_WARPS * DEPTH_WARPS;
constexpr int SUMS = ROWS * OUTPUTS;
constexpr bool LOOK_AHEAD = ROWS <= 4;  // with more, the registers for two steps of x would cost half of the warps
constexpr int STEP = 32 * DEPTH_WARPS;  // packs of k that all warps of an output take at once
using Values = Pack<Element, VECTOR>;

// A thread reads back only what it copied itself, so its own wait suffices. There is no cp.async below 4 bytes.
__device__ __forceinline__ void copy(Values* target, const Element* source, bool inside) {
    if constexpr (sizeof(Values) == 16) copy_async_16(shared_address(target), source, inside);
    if constexpr (sizeof(Values) == 8) copy_async_8(shared_address(target), source, inside);
    if constexpr (sizeof(Values) == 4) copy_async_4(shared_address(target), source, inside);
    if constexpr (sizeof(Values) == 2)
        if (inside) *target = load_pack<Element, VECTOR>(source);
}

__device__ __forceinline__ void multiply(float (&sums)[SUMS], const Values (&inputs)[ROWS],
                                         const Values (&weights)[OUTPUTS]) {
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o)
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                sums[r * OUTPUTS + o] += to_float(inputs[r].at[e]) * to_float(weights[o].at[e]);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    linear_warp_per_output(const Element* x, const Element* weight, const Element* bias, Element* y, int rows,
                           int in_features, int out_features, int weights_ready) {
    extern __shared__ __align__(16) unsigned char shared[];
    Values(*ring)[OUTPUTS][32] = reinterpret_cast<Values(*)[OUTPUTS][32]>(shared) + threadIdx.x / 32 * STAGES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int depth_warp = warp % DEPTH_WARPS;
    const int first_output = (blockIdx.x * OUTPUT_WARPS + warp / DEPTH_WARPS) * OUTPUTS;
    const int first_row = blockIdx.y * ROWS;
    const int packs = in_features / VECTOR;

    // Rows past the last repeat it: their sums are not stored.
    const Element *input_rows[ROWS], *weight_rows[OUTPUTS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) input_rows[r] = x + 1LL * min(first_row + r, rows - 1) * in_features;
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o)
        weight_rows[o] = weight + 1LL * min(first_output + o, out_features - 1) * in_features;

    const auto copy_weights = [&](int stage, int pack) {
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o)
            copy(&ring[stage][o][lane], weight_rows[o] + 1LL * pack * VECTOR, pack < packs);
        copy_async_commit();
    };
    const auto load_inputs = [&](Values(&values)[ROWS], int pack) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            values[r] = load_pack<Element, VECTOR>(input_rows[r] + 1LL * pack * VECTOR);
    };
    // After the reduction a lane has one output, shared by the lanes up to the next multiple of 32 / SUMS.
    const int mine = lane / (32 / SUMS);
    const int row = first_row + mine / OUTPUTS, output = first_output + mine % OUTPUTS;

    if (!weights_ready) wait_for_previous_launch();
    int pack = depth_warp * 32 + lane;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) copy_weights(stage, pack + stage * STEP);
    const float offset = HAS_BIAS ? to_float(bias[min(output, out_features - 1)]) : 0.f;
    wait_for_previous_launch();  // returns at once if already waited for
    Values inputs[ROWS], next[ROWS];
    if (LOOK_AHEAD && pack < packs) load_inputs(next, pack);

    float sums[SUMS] = {};
    int stage = 0;
#pragma unroll(ROWS > 2 ? 1 : 4)
    for (; pack < packs; pack += STEP) {
        if (!LOOK_AHEAD) load_inputs(inputs, pack);
        copy_async_wait<STAGES - 2>();
        copy_weights(stage == 0 ? STAGES - 1 : stage - 1, pack + (STAGES - 1) * STEP);
        if (LOOK_AHEAD) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) inputs[r] = next[r];
            load_inputs(next, pack + STEP < packs ? pack + STEP : pack);
        }
        Values weights[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) weights[o] = ring[stage][o][lane];
        multiply(sums, inputs, weights);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    copy_async_wait<0>();

    float sum = warp_sums(sums);
    if (DEPTH_WARPS > 1) {
        __shared__ float parts[WARPS][SUMS];
        if (lane % (32 / SUMS) == 0) parts[warp][mine] = sum;
        __syncthreads();
        if (depth_warp != 0) return;
        sum = 0.f;
#pragma unroll
        for (int part = 0; part < DEPTH_WARPS; ++part) sum += parts[warp + part][mine];
    }
    if (lane % (32 / SUMS) == 0 && row < rows && output < out_features)
        y[1LL * row * out_features + output] = from_float<Element>(activated<HAS_RELU>(sum + offset));
}
