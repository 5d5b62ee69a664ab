// y[o][i] = finished(over r: x[o][r][i]), or with SPLIT partial[split][o][i], a share of it
//
// A thread has VECTOR adjacent results, up to 16 bytes, and walks down its CTA's rows, PACKS in flight; a CTA is
// `width` packs wide, and its threads with the same results merge through smem. If there are few results, CTAs split
// the rows, and a second launch merges their states in order. Limiter: memory, each element is read once.
//
// Rung: `columns`. Read reduce.cuh (state of a reduction).
#include "reduce/reduce.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;      // vector: results per access
constexpr int PACKS = 4;       // config.packs: accesses in flight per thread
constexpr int THREADS = 256;   // config.threads
constexpr bool SPLIT = false;  // split: several CTAs share a result
#endif

template <int ROWS>
__device__ __forceinline__ void take_rows_of(State (&states)[VECTOR], const Element* from, long long step) {
    Pack<Element, VECTOR> packs[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) packs[i] = load_pack<Element, VECTOR>(from + i * step);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
        float values[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) values[i] = element_of(to_float(packs[i].at[e]));
        take(states[e], values);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_columns(const Element* x, Element* y, State* partial, int across, int width, long long results, int reduced,
                   int inner, int per_split, float divisor) {
    __shared__ float parts[3][VECTOR][THREADS];
    wait_for_previous_launch();
    const int height = THREADS / width;
    const int row_in_block = threadIdx.x / width;
    const long long outer = blockIdx.x / across;
    const int first =
        (static_cast<int>(blockIdx.x - outer * across) * width + threadIdx.x - row_in_block * width) * VECTOR;
    const bool works = row_in_block < height && first < inner;
    const int end = min(reduced, static_cast<int>(blockIdx.y + 1) * per_split);
    State states[VECTOR];
    if (works) {
        const Element* from = x + outer * reduced * inner + first;
        const long long step = 1LL * height * inner;
        int row = blockIdx.y * per_split + row_in_block;
        for (; row + (PACKS - 1) * height < end; row += PACKS * height)
            take_rows_of<PACKS>(states, from + 1LL * row * inner, step);
        for (; row < end; row += height) take_rows_of<1>(states, from + 1LL * row * inner, step);
    }

    // Halves the rows of threads until one is left; `height` need not be a power of two.
    int half = 1;
    while (half * 2 < height) half *= 2;
    for (; half > 0 && height > 1; half /= 2) {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            parts[0][e][threadIdx.x] = states[e].count;
            parts[1][e][threadIdx.x] = states[e].first;
            parts[2][e][threadIdx.x] = states[e].second;
        }
        __syncthreads();
        if (works && row_in_block < half && row_in_block + half < height) {
            const int other = threadIdx.x + half * width;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                State theirs;
                theirs.count = parts[0][e][other];
                theirs.first = parts[1][e][other];
                theirs.second = parts[2][e][other];
                states[e] = merged(states[e], theirs);
            }
        }
        __syncthreads();
    }
    if (!works || row_in_block > 0) return;
    const long long at = outer * inner + first;
    if (SPLIT) {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) partial[blockIdx.y * results + at + e] = states[e];
    } else {
        Pack<Element, VECTOR> pack;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) pack.at[e] = finished(states[e], divisor);
        store_pack(y + at, pack);
    }
}
