// y[o][i] = finished(over r: x[o][r][i]), or with SPLIT partial[split][o][i], a share of it
//
// A thread has VECTOR adjacent results, up to 16 bytes, and walks down its CTA's rows, PACKS in flight; a CTA is
// WIDTH packs wide, and its threads with the same results merge through smem, FOLD to one. If there are few results of
// many rows, CTAs split the rows, and a second launch merges their states in order. Limiter: memory, each element is
// read once.
//
// Rung: `columns`. Read reduce.cuh (state of a reduction).
#include "reduce/reduce.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;      // vector: results per access
constexpr int PACKS = 4;       // config.packs: accesses in flight per thread
constexpr int THREADS = 256;   // config.threads
constexpr int WIDTH = 32;      // config.width: adjacent accesses per CTA
constexpr bool SPLIT = false;  // split: several CTAs share a result
#endif

constexpr int HEIGHT = THREADS / WIDTH;  // rows that the CTA loads with one access per thread
constexpr int FOLD = 8;

template <int ROWS>
__device__ __forceinline__ void take_rows_of(State (&states)[VECTOR], const Element* from, long long step, int row) {
    Pack<Element, VECTOR> packs[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) packs[i] = load_pack<Element, VECTOR>(from + i * step);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
        float values[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) values[i] = element_of(to_float(packs[i].at[e]));
        take(states[e], values, [&](int i) { return row + i * HEIGHT; });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_columns(const Element* x, Result* y, State* partial, int across, long long results, int reduced,
                   int inner, int per_split, float divisor) {
    __shared__ float parts[MEMBERS][VECTOR][THREADS];
    wait_for_previous_launch();
    const int row_in_block = threadIdx.x / WIDTH;
    const long long outer = blockIdx.x / across;
    const int first =
        (static_cast<int>(blockIdx.x - outer * across) * WIDTH + threadIdx.x - row_in_block * WIDTH) * VECTOR;
    const bool works = row_in_block < HEIGHT && first < inner;
    const int end = min(reduced, static_cast<int>(blockIdx.y + 1) * per_split);
    State states[VECTOR];
    if (works) {
        const Element* from = x + outer * reduced * inner + first;
        const long long step = 1LL * HEIGHT * inner;
        int row = blockIdx.y * per_split + row_in_block;
        for (; row + (PACKS - 1) * HEIGHT < end; row += PACKS * HEIGHT)
            take_rows_of<PACKS>(states, from + 1LL * row * inner, step, row);
        for (; row < end; row += HEIGHT) take_rows_of<1>(states, from + 1LL * row * inner, step, row);
    }

    // Each round writes other rows of `parts` than those that slower threads still read: one barrier is enough.
    for (int left = HEIGHT; left > 1;) {
        const int kept = (left + FOLD - 1) / FOLD;
        if (works && row_in_block >= kept && row_in_block < left) {
#pragma unroll
            for (int i = 0; i < MEMBERS; ++i)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) parts[i][e][threadIdx.x] = states[e].member(i);
        }
        __syncthreads();
        if (works && row_in_block < kept) {
#pragma unroll 4
            for (int row = row_in_block + kept; row < left; row += kept) {
                const int other = threadIdx.x + (row - row_in_block) * WIDTH;
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    State theirs;
#pragma unroll
                    for (int i = 0; i < MEMBERS; ++i) theirs.member(i) = parts[i][e][other];
                    states[e] = merged(states[e], theirs);
                }
            }
        }
        left = kept;
    }
    if (!works || row_in_block > 0) return;
    const long long at = outer * inner + first;
    if (SPLIT) {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) partial[blockIdx.y * results + at + e] = states[e];
    } else {
        Pack<Result, VECTOR> pack;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) pack.at[e] = finished(states[e], divisor);
        store_pack(y + at, pack);
    }
}
