// y[row][output] = relu(sum over k of x[row][k] * weight[output][k] + bias[output])
//
// One CTA per TILE_ROWS x TILE_OUTPUTS outputs, from fp32 k-tiles of x and weights in smem, both transposed so that k
// is the slow index; THREAD_ROWS x THREAD_OUTPUTS accumulators per thread. The next k-tiles are loaded into registers
// while the present ones are multiplied. With SPLITS > 1 a CTA sums one part of k, and tiled_sum_parts.cu reduces the
// parts. Limiter: FFMA, and the smem reads between them.
//
// Rungs: `tiled`; `pool_first` after a mean.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                  // problem.dtype
using Output = float;                   // problem.dtype if config.splits == 1 else "fp32"
constexpr bool HAS_BIAS = true;         // problem.bias
constexpr bool HAS_RELU = false;        // problem.relu
constexpr int VECTOR = 4;               // vector
constexpr bool OUTPUTS_ALIGNED = true;  // problem.out_features % 4 == 0
constexpr int TILE_ROWS = 32;           // config.rows: rows of x per CTA
constexpr int TILE_OUTPUTS = 32;        // config.outputs: output features per CTA
constexpr int TILE_DEPTH = 16;          // tile_depth
constexpr int THREAD_ROWS = 4;          // config.thread_rows
constexpr int THREAD_OUTPUTS = 4;       // config.thread_outputs
constexpr int SPLITS = 1;               // config.splits: CTAs that share one sum
#endif

#include "common/epilogue.cuh"
#include "common/ptx.cuh"

constexpr int ROW_THREADS = TILE_ROWS / THREAD_ROWS;
constexpr int OUTPUT_THREADS = TILE_OUTPUTS / THREAD_OUTPUTS;
constexpr int THREADS = ROW_THREADS * OUTPUT_THREADS;
using Values = Pack<Element, VECTOR>;

// TILE rows of a matrix, TILE_DEPTH deep along k: through registers into smem.
template <int TILE>
struct Tile {
    static constexpr int PITCH = TILE + 4;  // rows of 16-byte packs start in different banks
    static constexpr int ROW_PACKS = TILE_DEPTH / VECTOR;
    static constexpr int PACKS = (TILE * ROW_PACKS + THREADS - 1) / THREADS;
    Values packs[PACKS];

    __device__ __forceinline__ void fetch(const Element* matrix, int first, int rows, int in_features, int first_k,
                                          int end_k) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int at = i * THREADS + threadIdx.x;
            const int row = first + at / ROW_PACKS, k = first_k + at % ROW_PACKS * VECTOR;
            packs[i] = Values{};
            if (at < TILE * ROW_PACKS && row < rows && k < end_k)
                packs[i] = load_pack<Element, VECTOR>(matrix + 1LL * row * in_features + k);
        }
    }

    __device__ __forceinline__ void store(float (*tile)[PITCH]) const {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int at = i * THREADS + threadIdx.x;
            if (at >= TILE * ROW_PACKS) continue;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                tile[at % ROW_PACKS * VECTOR + e][at / ROW_PACKS] = to_float(packs[i].at[e]);
        }
    }
};

// A thread's COUNT values of a row of smem: groups of four, interleaved so that adjacent threads' groups are
// contiguous.
template <int COUNT, int TILE>
__device__ __forceinline__ void read_fours(float (&values)[COUNT], const float* row, int thread) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const Pack<float, 4> four = load_pack<float, 4>(row + i * (TILE / COUNT) + thread * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) values[i + e] = four.at[e];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_tiled(const Element* x, const Element* weight, const Element* bias, Output* y, int rows, int in_features,
                 int out_features) {
    __shared__ __align__(16) float x_tile[2][TILE_DEPTH][Tile<TILE_ROWS>::PITCH];
    __shared__ __align__(16) float weight_tile[2][TILE_DEPTH][Tile<TILE_OUTPUTS>::PITCH];
    wait_for_previous_launch();

    const int output_tiles = (out_features + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    const int first_row = blockIdx.x / output_tiles * TILE_ROWS;
    const int first_output = blockIdx.x % output_tiles * TILE_OUTPUTS;
    const int row_thread = threadIdx.x / OUTPUT_THREADS, output_thread = threadIdx.x % OUTPUT_THREADS;

    const int depth_tiles = (in_features + TILE_DEPTH - 1) / TILE_DEPTH;
    const int first_k = 1LL * depth_tiles * blockIdx.y / SPLITS * TILE_DEPTH;
    const int end_k = min(1LL * in_features, 1LL * depth_tiles * (blockIdx.y + 1) / SPLITS * TILE_DEPTH);

    float sums[THREAD_ROWS][THREAD_OUTPUTS] = {};
    Tile<TILE_ROWS> x_next;
    Tile<TILE_OUTPUTS> weight_next;
    x_next.fetch(x, first_row, rows, in_features, first_k, end_k);
    weight_next.fetch(weight, first_output, out_features, in_features, first_k, end_k);
    int buffer = 0;
    for (int k = first_k; k < end_k; k += TILE_DEPTH, buffer ^= 1) {
        x_next.store(x_tile[buffer]);
        weight_next.store(weight_tile[buffer]);
        // The other buffer may still be read; this one was last read before the previous iteration's barrier.
        __syncthreads();
        x_next.fetch(x, first_row, rows, in_features, k + TILE_DEPTH, end_k);
        weight_next.fetch(weight, first_output, out_features, in_features, k + TILE_DEPTH, end_k);
#pragma unroll
        for (int depth = 0; depth < TILE_DEPTH; ++depth) {
            float a[THREAD_ROWS], b[THREAD_OUTPUTS];
            read_fours<THREAD_ROWS, TILE_ROWS>(a, x_tile[buffer][depth], row_thread);
            read_fours<THREAD_OUTPUTS, TILE_OUTPUTS>(b, weight_tile[buffer][depth], output_thread);
#pragma unroll
            for (int r = 0; r < THREAD_ROWS; ++r)
#pragma unroll
                for (int o = 0; o < THREAD_OUTPUTS; ++o) sums[r][o] += a[r] * b[o];
        }
    }

    Output* part = y + 1LL * blockIdx.y * rows * out_features;
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
        const int row = first_row + r / 4 * 4 * ROW_THREADS + row_thread * 4 + r % 4;
        if (row >= rows) continue;
#pragma unroll
        for (int o = 0; o < THREAD_OUTPUTS; o += 4) {
            const int output = first_output + o * OUTPUT_THREADS + output_thread * 4;
            Pack<Output, 4> results;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float sum = sums[r][o + e];
                if (HAS_BIAS && output + e < out_features) sum += to_float(bias[output + e]);
                results.at[e] = from_float<Output>(activated<HAS_RELU>(sum));
            }
            Output* target = part + 1LL * row * out_features + output;
            if (OUTPUTS_ALIGNED) {
                if (output < out_features) store_pack(target, results);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (output + e < out_features) target[e] = results.at[e];
            }
        }
    }
}
