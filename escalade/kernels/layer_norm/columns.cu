// y[row][f] = activated((x[row][f] - mean) / sqrt(variance + epsilon) * weight[f] + bias[f]), features `inner` apart
//
// Adjacent rows are contiguous: a lane takes VECTOR of them, 16 bytes where they divide, and PARTS warps split the
// features, STEPS each, all loaded at once. Mean and variance are computed one after the other from registers, so
// nothing cancels. Limiter: memory, each element is read and written once.
//
// Rung: `columns`. Read common/columns.cuh (tile), layer_norm.cuh.
#include "common/columns.cuh"
#include "layer_norm/layer_norm.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int STEPS = 8;  // -(-problem.features // config.parts): elements of a row per thread
#endif

extern "C" __global__ void __launch_bounds__(32 * PARTS)
    layer_norm_columns(const Element* x, const Element* weight, const Element* bias, Element* y, int rows,
                       int features, float epsilon, int inner) {
    wait_for_previous_launch();
    const Column column = Column::of_thread(rows, features, inner);
    Pack<Element, VECTOR> loaded[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int at = i * PARTS + column.part;  // out-of-range features load a valid one
        loaded[i] = load_pack<Element, VECTOR>(x + column.at + 1LL * (at < features ? at : 0) * inner);
    }
    float means[VECTOR] = {}, squares[VECTOR] = {};
    if (HAS_MEAN) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                means[e] += i * PARTS + column.part < features ? to_float(loaded[i].at[e]) : 0.f;
        sum_over_parts(means);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) means[e] /= features;
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const float difference = to_float(loaded[i].at[e]) - means[e];
            squares[e] += i * PARTS + column.part < features ? difference * difference : 0.f;
        }
    sum_over_parts(squares);
    if (!column.there) return;
    float scales[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) scales[e] = rsqrtf(squares[e] / features + epsilon);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int at = i * PARTS + column.part;
        if (at >= features) continue;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            loaded[i].at[e] = normalized(to_float(loaded[i].at[e]), means[e], scales[e], weight, bias, at);
        store_pack(y + column.at + 1LL * at * inner, loaded[i]);
    }
}
