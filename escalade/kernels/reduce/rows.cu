// y[row] = finished(over r: x[row][r]), or with SPLIT partial[split][row], a share of it
//
// ROW_THREADS threads per row, part of a warp for short rows and a CTA for long ones, read it by packs of up to 16
// bytes, PACKS in flight; lanes merge by shuffles, warps through smem. CTAs split few long rows, and a second launch
// merges their states in order. Limiter: memory, each element is read once.
//
// Rung: `rows`; also the second stage of the sums of pointwise_loss and cross_entropy. Read reduce.cuh (state of a
// reduction).
#include "reduce/reduce.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;        // vector: elements per access
constexpr int PACKS = 4;         // config.packs: accesses in flight per thread
constexpr int THREADS = 128;     // config.threads
constexpr int ROW_THREADS = 32;  // config.row_threads: threads per row
constexpr bool SPLIT = false;    // split: several CTAs share a row
#endif

constexpr int WARPS = ROW_THREADS < 32 ? 1 : ROW_THREADS / 32;  // per row
static_assert(WARPS <= 1 || ROW_THREADS == THREADS, "warps of one row share the CTA barrier");
using Values = Pack<Element, VECTOR>;

template <int COUNT>
__device__ __forceinline__ void take_packs(State& state, const Element* from) {
    Values packs[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) packs[i] = load_pack<Element, VECTOR>(from + i * ROW_THREADS * VECTOR);
    float values[COUNT * VECTOR];
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) values[i * VECTOR + e] = element_of(to_float(packs[i].at[e]));
    take(state, values);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_rows(const Element* x, Element* y, State* partial, long long rows, int packs, int per_split, float divisor) {
    wait_for_previous_launch();
    const long long row = 1LL * blockIdx.x * (THREADS / ROW_THREADS) + threadIdx.x / ROW_THREADS;
    const int thread = threadIdx.x % ROW_THREADS;
    const int end = min(packs, static_cast<int>(blockIdx.y + 1) * per_split);
    State state;
    if (row < rows) {
        const Element* from = x + row * packs * VECTOR;
        int pack = blockIdx.y * per_split + thread;
        for (; pack + (PACKS - 1) * ROW_THREADS < end; pack += PACKS * ROW_THREADS)
            take_packs<PACKS>(state, from + 1LL * pack * VECTOR);
        for (; pack < end; pack += ROW_THREADS) take_packs<1>(state, from + 1LL * pack * VECTOR);
    }
#pragma unroll
    for (int distance = (ROW_THREADS < 32 ? ROW_THREADS : 32) / 2; distance > 0; distance /= 2)
        state = merged(state, shuffled_down(state, distance));
    if constexpr (WARPS > 1) {
        __shared__ float of_warps[3][WARPS];
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0)
            of_warps[0][warp] = state.count, of_warps[1][warp] = state.first, of_warps[2][warp] = state.second;
        __syncthreads();
        if (warp > 0) return;
        state = State{};
        if (lane < WARPS)
            state.count = of_warps[0][lane], state.first = of_warps[1][lane], state.second = of_warps[2][lane];
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) state = merged(state, shuffled_down(state, distance));
    }
    if (thread != 0 || row >= rows) return;
    if (SPLIT)
        partial[blockIdx.y * rows + row] = state;
    else
        y[row] = finished(state, divisor);
}
