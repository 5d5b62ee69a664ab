// y[row][class] = activated(exp(x[row][class] - largest) / sum over classes of exp(x[row][class] - largest)),
// or with LOG activated(its logarithm); classes `inner` apart
//
// Adjacent rows are contiguous: a thread takes VECTOR of them, 16 bytes where they divide, and PARTS groups of warps
// split the classes, STEPS each, all loaded at once. Limiter: memory, each element is read and written once.
//
// Rung: `columns`. Read common/columns.cuh (tiles and how they are loaded), softmax.cuh.
#include "common/columns.cuh"
#include "softmax/softmax.cuh"

// Results in 16 bits do not show the error of ex2.approx; it takes a third of the instructions.
template <bool IS_LOG>
__device__ __forceinline__ float column_term(float logit, float largest) {
    if (IS_LOG || sizeof(Element) > 2) return softmax_term<IS_LOG>(logit, largest);
    return exp2_approximate((logit - largest) * 1.44269504f);
}

extern "C" __global__ void __launch_bounds__(COLUMN_THREADS, BLOCKS_PER_SM)
    softmax_columns(const Element* x, Element* y, int rows, int classes, int inner) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    const StagedColumn staged(shared_part(reinterpret_cast<Rows*>(shared_memory), REST));
    wait_for_previous_launch();
    Column column = Column::of_thread(blockIdx.x, rows, classes, inner);
    staged.copy(x, column, classes, inner);
    const u32 tiles = tiles_of(rows);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Rows loaded[STEPS];
        staged.read(loaded, x, column, classes, inner);
        float values[STEPS][VECTOR], largest[VECTOR], sums[VECTOR] = {};
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) largest[e] = minus_infinity();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            to_floats(values[i], loaded[i]);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                values[i][e] = column.has(i, classes) ? values[i][e] : minus_infinity();
                largest[e] = fmaxf(largest[e], values[i][e]);
            }
        }
        const Column current = column;
        if (tile + gridDim.x < tiles) {
            column = Column::of_thread(tile + gridDim.x, rows, classes, inner);
            staged.copy(x, column, classes, inner);
        }
        over_parts(largest, [](float one, float other) { return fmaxf(one, other); });
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                values[i][e] = column_term<LOG>(values[i][e], largest[e]);
                const float numerator = LOG ? expf(values[i][e]) : values[i][e];
                sums[e] += current.has(i, classes) ? numerator : 0.f;
            }
        sum_over_parts(sums);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sums[e] = SoftmaxSums{largest[e], sums[e]}.divisor<LOG>();
        Element* to = y + current.at + 1LL * current.part * inner;
#pragma unroll
        for (int i = 0; i < STEPS; ++i, to += 1LL * PARTS * inner) {
            if (!current.there || !current.has(i, classes)) continue;
            Rows results;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) results.at[e] = finished(values[i][e], sums[e]);
            store_pack(to, results);
        }
    }
}
