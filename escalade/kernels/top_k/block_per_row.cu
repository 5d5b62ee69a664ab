// y[row] = the K largest of softmax(x[row]), largest first, and then their K classes
//
// As many warps per row as its width needs, up to 16 bytes per load; each warp finds its own best K and stores them in
// smem, from which the first warp selects the best of all. With one warp per row, ROWS of them share a CTA, and no smem
// is used. Limiter: memory for wide rows, else the instructions that maintain the lists.
//
// Rung: `block_per_row`. Read ranking.cuh (order of the classes).
#include "top_k/ranking.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
constexpr int K = 5;          // problem.k
constexpr int VECTOR = 4;     // vector: elements per access
constexpr int WARPS = 8;      // config.warps: warps per row
constexpr int IN_FLIGHT = 4;  // config.in_flight: loads per thread
constexpr int ROWS = 1;       // config.rows: rows per CTA
#endif

constexpr int THREADS = WARPS * 32;  // per row
using Values = Pack<Element, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS* ROWS)
    top_k_block_per_row(const Element* x, float* y, int rows, int classes) {
    wait_for_previous_launch();
    const int thread = threadIdx.x % THREADS, lane = threadIdx.x % 32;
    const long long row = 1LL * blockIdx.x * ROWS + threadIdx.x / THREADS;
    if (row >= rows) return;  // all of its warps exit; with several warps per row there is no such row
    const Element* logits = x + row * classes;
    const int packs = classes / VECTOR;

    Best best;
    SoftmaxSums sums;
    for (int first = thread; first < packs; first += IN_FLIGHT * THREADS) {
        Values loaded[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int pack = first + i * THREADS;
            loaded[i] = load_pack<Element, VECTOR>(logits + 1LL * (pack < packs ? pack : first) * VECTOR);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int pack = first + i * THREADS;
            if (pack >= packs) continue;
            float values[VECTOR];
            to_floats(values, loaded[i]);
            sums.add(values);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) best.add(entry_of(values[e], pack * VECTOR + e));
        }
    }
    sums.merge_warp();
    u64 mine = best.over_warp();

    if constexpr (WARPS > 1) {
        __shared__ u64 entries[WARPS * K];
        __shared__ float largest[WARPS], partial[WARPS];
        const int warp = threadIdx.x / 32;
        if (lane < K) entries[warp * K + lane] = mine;
        if (lane == 0) largest[warp] = sums.largest, partial[warp] = sums.sum;
        __syncthreads();
        if (warp > 0) return;
        sums.largest = lane < WARPS ? largest[lane] : minus_infinity();
        sums.sum = lane < WARPS ? partial[lane] : 0.f;
        sums.merge_warp();
        Best finalists;
        for (int i = lane; i < WARPS * K; i += 32) finalists.add(entries[i]);
        mine = finalists.over_warp();
    }
    if (lane < K) store_entry(y + row * 2 * K, lane, mine, sums.largest, sums.scale());
}
