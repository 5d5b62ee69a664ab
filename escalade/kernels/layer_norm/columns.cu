// y[row][f] = activated((x[row][f] - mean) / sqrt(variance + epsilon) * weight[f] + bias[f]), features `inner` apart
//
// Adjacent rows are contiguous: a thread takes VECTOR of them, 16 bytes where they divide, and PARTS groups of warps
// split the features, STEPS each, all loaded at once. Mean and variance are computed one after the other from registers,
// so nothing cancels. Limiter: memory, each element is read and written once.
//
// Rung: `columns`. Read common/columns.cuh (tiles and how they are loaded), layer_norm.cuh.
#include "common/columns.cuh"
#include "layer_norm/layer_norm.cuh"

extern "C" __global__ void __launch_bounds__(COLUMN_THREADS, BLOCKS_PER_SM)
    layer_norm_columns(const Element* x, const Parameter* weight, const Parameter* bias, Element* y, int rows,
                       int features, float epsilon, int inner) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    constexpr int TILE = STAGED ? STEPS * COLUMN_THREADS : 0;
    Rows* const start = reinterpret_cast<Rows*>(shared_memory);
    const StagedColumn staged(shared_part(start, TILE));
    // Weights, then biases: from global memory they would all be loaded ahead, and take registers.
    float* const weights = shared_part(reinterpret_cast<float*>(start + TILE), REST);
    const float* const biases = weights + (HAS_WEIGHT ? features : 0);
    wait_for_previous_launch();
    Column column = Column::of_thread(blockIdx.x, rows, features, inner);
    staged.copy(x, column, features, inner);
#pragma unroll 1
    for (int feature = threadIdx.x; feature < features; feature += COLUMN_THREADS) {
        if (HAS_WEIGHT) weights[feature] = to_float(weight[feature]);
        if (HAS_BIAS) weights[(HAS_WEIGHT ? features : 0) + feature] = to_float(bias[feature]);
    }
    if (HAS_WEIGHT || HAS_BIAS) __syncthreads();
    const u32 tiles = tiles_of(rows);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Rows loaded[STEPS];
        staged.read(loaded, x, column, features, inner);
        float means[VECTOR] = {}, squares[VECTOR] = {};
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float value = to_float(loaded[i].at[e]);
                const float term = HAS_MEAN ? value : value * value;
                (HAS_MEAN ? means : squares)[e] += column.has(i, features) ? term : 0.f;
            }
        const Column current = column;
        if (tile + gridDim.x < tiles) {
            column = Column::of_thread(tile + gridDim.x, rows, features, inner);
            staged.copy(x, column, features, inner);
        }
        if (HAS_MEAN) {
            sum_over_parts(means);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) means[e] /= features;
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    const float difference = to_float(loaded[i].at[e]) - means[e];
                    squares[e] += current.has(i, features) ? difference * difference : 0.f;
                }
        }
        sum_over_parts(squares);
        float scales[VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) scales[e] = rsqrtf(squares[e] / features + epsilon);
        Element* to = y + current.at + 1LL * current.part * inner;
#pragma unroll
        for (int i = 0; i < STEPS; ++i, to += 1LL * PARTS * inner) {
            if (!current.there || !current.has(i, features)) continue;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                loaded[i].at[e] = normalized(to_float(loaded[i].at[e]), means[e], scales[e], weights, biases,
                                             current.element(i));
            store_pack(to, loaded[i]);
        }
    }
}
