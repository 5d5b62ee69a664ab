// y[row][output] = relu(sum over k of x[row][k] * weight[output][k] + bias[output]), for a few rows
//
// With few rows the weights are a stream that should run at memory speed. Outputs are the rows of mma.sync, rows of x its
// columns. Both go from global memory straight to registers: a product may take k in any order if both operands take it
// in the same, so a lane's 16 bytes of a row are its share of two products. A warp has OUTPUT_TILES times 16 outputs, all
// rows of x of the CTA, and every WARPS-th piece of k; UNITS pieces are multiplied while the next are in flight. The warps
// of a CTA merge in smem, in order. Weights that are ready do not wait for the previous launch (PDL). Limiter: memory.
//
// Rung: `streamed`. Read common/loads.cuh.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;               // problem.dtype
constexpr bool HAS_BIAS = true;      // problem.bias
constexpr bool HAS_RELU = false;     // problem.relu
constexpr int OUTPUT_TILES = 1;      // config.output_tiles: 16 outputs each
constexpr int ROW_TILES = 1;         // row_tiles: 8 rows of x each
constexpr int WARPS = 8;             // config.warps: warps per CTA, along k
constexpr int UNITS = 2;             // config.units: pieces of k per warp that are loaded together
constexpr bool EVICT_FIRST = false;  // config.evict_first: weights leave L2 first
constexpr int BLOCKS_PER_SM = 2;     // blocks_per_sm
#endif

#include "common/epilogue.cuh"
#include "common/loads.cuh"
#include "common/mma_tile.cuh"

constexpr int VECTOR = 8;      // elements of 16 bytes
constexpr int HALF = 32;       // elements of k in two products: 16 bytes for each of 4 lanes
constexpr int UNIT = 2 * HALF; // a cache line per row
constexpr int TILE = 128;      // results of a product

struct Weights {
    uint4 at[UNITS][OUTPUT_TILES][2][2];  // rows `group` and `group` + 8 of a tile, both halves of a unit
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    linear_streamed(const Element* x, const Element* weight, const Element* bias, Element* y, int rows, int in_features,
                    int out_features, int weights_ready) {
    __shared__ float parts[WARPS][OUTPUT_TILES * ROW_TILES * TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = lane / 4, member = lane % 4;
    const int first_output = blockIdx.x * (16 * OUTPUT_TILES), first_row = blockIdx.y * (8 * ROW_TILES);

    // Outputs and rows past the last repeat it: their results are not stored.
    const Element *weight_rows[OUTPUT_TILES][2], *input_rows[ROW_TILES];
#pragma unroll
    for (int m = 0; m < OUTPUT_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            weight_rows[m][h] = weight + 1LL * min(first_output + 16 * m + 8 * h + group, out_features - 1) * in_features;
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
        input_rows[n] = x + 1LL * min(first_row + 8 * n + group, rows - 1) * in_features;

    const auto load_weights = [&](Weights& weights, int first) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int k = first + u * (WARPS * UNIT) + half * HALF + member * VECTOR;
#pragma unroll
                for (int m = 0; m < OUTPUT_TILES; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        weights.at[u][m][h][half] =
                            load_16_once_if<EVICT_FIRST>(k < in_features, weight_rows[m][h] + k);
            }
    };

    if (!weights_ready) wait_for_previous_launch();
    int first = warp * UNIT;
    Weights next;
    load_weights(next, first);
    wait_for_previous_launch();  // returns at once if already waited for

    float sums[OUTPUT_TILES][ROW_TILES][4] = {};
#pragma unroll 1
    for (; first < in_features; first += UNITS * WARPS * UNIT) {
        const Weights weights = next;
        uint4 inputs[UNITS][2][ROW_TILES];
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int k = first + u * (WARPS * UNIT) + half * HALF + member * VECTOR;
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n)
                    inputs[u][half][n] = load_16_if(k < in_features, input_rows[n] + k);
            }
        load_weights(next, first + UNITS * WARPS * UNIT);
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                    for (int m = 0; m < OUTPUT_TILES; ++m) {
                        const uint4 upper = weights.at[u][m][0][half], lower = weights.at[u][m][1][half];
                        const uint4 input = inputs[u][half][n];
                        const u32 a[2][4] = {{upper.x, lower.x, upper.y, lower.y}, {upper.z, lower.z, upper.w, lower.w}};
                        const u32 b[2][2] = {{input.x, input.y}, {input.z, input.w}};
                        multiply_add<Element>(sums[m][n], a[0], b[0]);
                        multiply_add<Element>(sums[m][n], a[1], b[1]);
                    }
    }

#pragma unroll
    for (int m = 0; m < OUTPUT_TILES; ++m)
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) parts[warp][(m * ROW_TILES + n) * TILE + i * 32 + lane] = sums[m][n][i];
    __syncthreads();
    for (int at = threadIdx.x; at < OUTPUT_TILES * ROW_TILES * TILE; at += WARPS * 32) {
        const int tile = at / TILE, i = at % TILE / 32;  // `lane` is also at % 32
        const int output = first_output + tile / ROW_TILES * 16 + i / 2 * 8 + group;
        const int row = first_row + tile % ROW_TILES * 8 + member * 2 + i % 2;
        if (row >= rows || output >= out_features) continue;
        float sum = HAS_BIAS ? to_float(bias[output]) : 0.f;
#pragma unroll
        for (int part = 0; part < WARPS; ++part) sum += parts[part][at];
        y[1LL * row * out_features + output] = from_float<Element>(activated<HAS_RELU>(sum));
    }
}
