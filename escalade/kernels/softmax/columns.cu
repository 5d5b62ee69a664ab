// y[row][class] = exp(x[row][class] - largest) / sum over classes of exp(x[row][class] - largest), or with LOG
// its logarithm; classes `inner` apart
//
// Adjacent rows are contiguous: a lane takes VECTOR of them, 16 bytes where they divide, and PARTS warps split the
// classes, STEPS each, all loaded at once. Limiter: memory, each element is read and written once.
//
// Rung: `columns`. Read common/columns.cuh (tile).
#include "common/columns.cuh"
#include "common/softmax.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;       // problem.dtype
#define LOG false            // "true" if problem.log else "false"
constexpr int STEPS = 8;     // -(-problem.classes // config.parts): elements of a row per thread
#endif

extern "C" __global__ void __launch_bounds__(32 * PARTS)
    softmax_columns(const Element* x, Element* y, int rows, int classes, int inner) {
    wait_for_previous_launch();
    const Column column = Column::of_thread(rows, classes, inner);
    Pack<Element, VECTOR> loaded[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int at = i * PARTS + column.part;  // out-of-range classes load a valid one
        loaded[i] = load_pack<Element, VECTOR>(x + column.at + 1LL * (at < classes ? at : 0) * inner);
    }
    float values[STEPS][VECTOR], largest[VECTOR], sums[VECTOR] = {};
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) largest[e] = minus_infinity();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        to_floats(values[i], loaded[i]);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            values[i][e] = i * PARTS + column.part < classes ? values[i][e] : minus_infinity();
            largest[e] = fmaxf(largest[e], values[i][e]);
        }
    }
    over_parts(largest, [](float one, float other) { return fmaxf(one, other); });
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            values[i][e] = softmax_term<LOG>(values[i][e], largest[e]);
            const float numerator = LOG ? expf(values[i][e]) : values[i][e];
            sums[e] += i * PARTS + column.part < classes ? numerator : 0.f;
        }
    sum_over_parts(sums);
    if (!column.there) return;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) sums[e] = SoftmaxSums{largest[e], sums[e]}.divisor<LOG>();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int at = i * PARTS + column.part;
        if (at >= classes) continue;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            loaded[i].at[e] = from_float<Element>(softmax_result<LOG>(values[i][e], sums[e]));
        store_pack(y + column.at + 1LL * at * inner, loaded[i]);
    }
}
