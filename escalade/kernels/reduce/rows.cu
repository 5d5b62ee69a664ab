// y[row] = finished(over r: x[row][r]), or with SPLIT partial[split][row], a share of it
//
// ROW_THREADS threads per row, part of a warp for short rows and a CTA for long ones, read it by packs of up to 16
// bytes, PACKS in flight for each of the ROWS rows of a thread; lanes merge by shuffles, warps through smem. CTAs split
// few long rows, and a second launch merges their states in order. Limiter: memory, each element is read once.
//
// Rung: `rows`; also the second stage of the sums of pointwise_loss and cross_entropy. Read reduce.cuh (state of a
// reduction).
#include "reduce/reduce.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;        // vector: elements per access
constexpr int PACKS = 4;         // config.packs: accesses in flight per thread and row
constexpr int ROWS = 1;          // config.rows: rows per thread
constexpr int THREADS = 128;     // config.threads
constexpr int ROW_THREADS = 32;  // config.row_threads: threads per row
constexpr bool SPLIT = false;    // split: several CTAs share a row
#endif

constexpr int WARPS = ROW_THREADS < 32 ? 1 : ROW_THREADS / 32;  // per row
constexpr int LANES = ROW_THREADS < 32 ? ROW_THREADS : 32;      // that merge by shuffles
constexpr int GROUPS = THREADS / ROW_THREADS;                   // rows that the CTA loads with one access per thread
static_assert(WARPS <= 1 || (ROW_THREADS == THREADS && ROWS == 1), "warps of one row share the CTA barrier");
static_assert((WARPS & (WARPS - 1)) == 0, "merges halve the warps of a row");
using Values = Pack<Element, VECTOR>;

// All loads are in flight before the first value is used.
template <int COUNT>
__device__ __forceinline__ void take_packs(State (&states)[ROWS], const Element* const (&from)[ROWS], int pack) {
    Values packs[ROWS][COUNT];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            packs[r][i] = load_pack<Element, VECTOR>(from[r] + (pack + i * ROW_THREADS) * VECTOR);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float values[COUNT * VECTOR];
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) values[i * VECTOR + e] = element_of(to_float(packs[r][i].at[e]));
        take(states[r], values, [&](int i) {
            return (pack + i / VECTOR * ROW_THREADS) * VECTOR + i % VECTOR;
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_rows(const Element* x, Result* y, State* partial, int rows, int packs, int per_split, float divisor) {
    wait_for_previous_launch();
    const int first_row = blockIdx.x * (GROUPS * ROWS) + threadIdx.x / ROW_THREADS;
    const int thread = threadIdx.x % ROW_THREADS;
    const int end = min(packs, static_cast<int>(blockIdx.y + 1) * per_split);
    const Element* from[ROWS];  // a missing row is the last one, and not stored
#pragma unroll
    for (int r = 0; r < ROWS; ++r) from[r] = x + 1LL * min(first_row + r * GROUPS, rows - 1) * packs * VECTOR;
    State states[ROWS];
    int pack = blockIdx.y * per_split + thread;
#pragma unroll 1
    for (; pack + (PACKS - 1) * ROW_THREADS < end; pack += PACKS * ROW_THREADS) take_packs<PACKS>(states, from, pack);
    if constexpr (PACKS > 1) {
#pragma unroll(ROWS > 1 ? 1 : 4)
        for (; pack < end; pack += ROW_THREADS) take_packs<1>(states, from, pack);
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) states[r] = merged(states[r], shuffled_down(states[r], distance));
    if constexpr (WARPS > 1) {
        __shared__ float of_warps[MEMBERS][WARPS];
        State& state = states[0];
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < MEMBERS; ++i)
            if (lane == 0) of_warps[i][warp] = state.member(i);
        __syncthreads();
        if (warp > 0) return;
#pragma unroll
        for (int i = 0; i < MEMBERS; ++i) state.member(i) = of_warps[i][lane % WARPS];
#pragma unroll
        for (int distance = WARPS / 2; distance > 0; distance /= 2)
            state = merged(state, shuffled_down(state, distance));
    }
    if (thread != 0) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = first_row + r * GROUPS;
        if (row >= rows) return;
        if (SPLIT)
            partial[1LL * blockIdx.y * rows + row] = states[r];
        else
            y[row] = finished(states[r], divisor);
    }
}
