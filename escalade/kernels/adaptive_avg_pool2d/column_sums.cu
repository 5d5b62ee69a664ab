// y[n][c][oh][ow] = mean of x[n][c] over the window of output (oh, ow)                                        (NCHW)
//
// A CTA computes GROUP consecutive rows of outputs. First it sums each row's windows down the columns: a thread takes
// 16 bytes of a row of x, and every SPLITS-th row of the windows, so that adjacent lanes load adjacent packs however
// windows begin. The sums of columns are exchanged through smem, and LANES lanes per output add those of its window.
// All sizes but the number of planes are compile-time constants. Limiter: memory; rows that two windows share are read
// twice, the second time out of L1 or L2.
//
// Rung: `column_sums`. window.cuh has PyTorch's rule for windows.
#include "adaptive_avg_pool2d/window.cuh"
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr int HEIGHT = 64;        // problem.height
constexpr int WIDTH = 64;         // problem.width
constexpr int OUTPUT_HEIGHT = 7;  // problem.output_height
constexpr int OUTPUT_WIDTH = 7;   // problem.output_width
constexpr int VECTOR = 4;         // vector: columns per load
constexpr int THREADS = 128;      // config.threads
constexpr int GROUP = 8;          // config.group(problem): rows of outputs per CTA
constexpr int SPLITS = 1;         // config.splits: threads that share a column of a window
constexpr int PITCH = 68;         // config.pitch(problem): elements from row to row of the sums in smem
constexpr int AHEAD = 10;         // config.ahead(problem): loads in flight per thread
constexpr int LANES = 2;          // config.lanes(problem): lanes per output
#endif

constexpr int PACKS = WIDTH / VECTOR;
constexpr int STORED = VECTOR < 4 ? VECTOR : 4;  // sums per access to smem

extern "C" __global__ void __launch_bounds__(THREADS)
    adaptive_avg_pool2d_column_sums(const Element* __restrict__ x, Element* __restrict__ y, int output_rows) {
    __shared__ __align__(16) float sums[GROUP * SPLITS * PITCH];
    wait_for_previous_launch();
    const u32 first = blockIdx.x * GROUP;
    const u32 rows = min(static_cast<u32>(GROUP), output_rows - first);

    for (u32 task = threadIdx.x; task < rows * SPLITS * PACKS; task += THREADS) {
        const u32 pack = task % PACKS, part = task / PACKS;  // part: of a row of outputs
        const u32 row = first + part / SPLITS;
        const int output_row = row % OUTPUT_HEIGHT;
        const Element* plane = x + 1LL * (row / OUTPUT_HEIGHT) * (HEIGHT * WIDTH) + pack * VECTOR;
        const int past = window_past(output_row, HEIGHT, OUTPUT_HEIGHT);
        __align__(16) float along[VECTOR] = {};
        for (int top = window_first(output_row, HEIGHT, OUTPUT_HEIGHT) + part % SPLITS; top < past;
             top += AHEAD * SPLITS) {
            Pack<Element, VECTOR> packs[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int from = top + i * SPLITS;
                packs[i] = load_pack_if<Element, VECTOR>(from < past, plane + from * WIDTH);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) along[e] += to_float(packs[i].at[e]);
        }
        float* found = sums + part * PITCH + pack * VECTOR;
#pragma unroll
        for (int e = 0; e < VECTOR; e += STORED)
            store_pack(found + e, reinterpret_cast<const Pack<float, STORED>&>(along[e]));
    }
    __syncthreads();

    const u32 lane = threadIdx.x % LANES;
    const u32 outputs = rows * OUTPUT_WIDTH;
    for (u32 base = 0; base < outputs; base += THREADS / LANES) {  // whole warps: shuffles need all lanes
        const u32 at = base + threadIdx.x / LANES;
        const u32 row = at / OUTPUT_WIDTH;
        const int output_row = (first + row) % OUTPUT_HEIGHT, output_column = at % OUTPUT_WIDTH;
        const int left = window_first(output_column, WIDTH, OUTPUT_WIDTH);
        const int past = at < outputs ? window_past(output_column, WIDTH, OUTPUT_WIDTH) : 0;
        float sum = 0.f;
        for (int column = left + lane; column < past; column += LANES)
#pragma unroll
            for (int split = 0; split < SPLITS; ++split) sum += sums[(row * SPLITS + split) * PITCH + column];
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
        const int height = window_past(output_row, HEIGHT, OUTPUT_HEIGHT) -
                           window_first(output_row, HEIGHT, OUTPUT_HEIGHT);
        if (lane == 0 && at < outputs)
            y[1LL * first * OUTPUT_WIDTH + at] = from_float<Element>(sum / (height * (past - left)));
    }
}
