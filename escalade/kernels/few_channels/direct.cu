// y[n][k][oh][ow] = relu(sum over c, r, s of x[n][c][oh - pad_h + r][ow - pad_w + s] * w[k][c][r][s] + bias[k])
//
// A thread has RUN adjacent pixels of a row for FILTERS_EACH filters. Per channel and filter row it reads its part of x
// once, into a register window over which the taps slide. The weights are uniform over all threads: in smem as
// [c][r][s][k], where a read is a broadcast, or in constant memory. Limiter: reads of x, RUN + S - 1 per RUN * S *
// FILTERS_EACH multiply-adds, each with a bounds check.
//
// Rung: `direct`. Read shape.cuh (sizes, image access).
#include "common/epilogue.cuh"
#include "common/ptx.cuh"
#include "few_channels/shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool HAS_BIAS = false;  // problem.bias
constexpr bool HAS_RELU = false;  // problem.relu
constexpr int FILTER_HEIGHT = 7;  // problem.filter_height
constexpr int FILTER_WIDTH = 7;   // problem.filter_width
constexpr int RUN = 8;            // config.run: adjacent pixels per thread
constexpr int FILTERS_EACH = 4;   // config.filters: filters per thread
constexpr int THREADS = 128;      // config.threads
#define CONSTANT_WEIGHTS 0        // constant_weights: weights in constant memory, 0 for shared memory
#endif

constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int WINDOW = RUN + FILTER_WIDTH - 1;
constexpr int WIDE = FILTERS_EACH < 4 ? FILTERS_EACH : 4;  // weights per smem read

#if CONSTANT_WEIGHTS > 0
__constant__ Element constant_weights[CONSTANT_WEIGHTS];
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    few_channels_direct(const Source* __restrict__ x, const Element* __restrict__ weight,
                        const Element* __restrict__ bias, Element* __restrict__ y, FewChannelsShape shape) {
    wait_for_previous_launch();
    const int first_filter = blockIdx.y * FILTERS_EACH;
#if CONSTANT_WEIGHTS == 0
    __shared__ __align__(16) float weights[CHANNELS * TAPS * FILTERS_EACH];
    for (int i = threadIdx.x; i < CHANNELS * TAPS * FILTERS_EACH; i += THREADS) {
        const int filter = first_filter + i / (CHANNELS * TAPS), at = i % (CHANNELS * TAPS);
        weights[at * FILTERS_EACH + i / (CHANNELS * TAPS)] =
            filter < shape.filters ? to_float(weight[filter * CHANNELS * TAPS + at]) : 0.f;
    }
    __syncthreads();
#endif
    const int row_runs = (shape.conv_width + RUN - 1) / RUN;
    const long long run = 1LL * blockIdx.x * THREADS + threadIdx.x;
    if (run >= 1LL * shape.batch * shape.conv_height * row_runs) return;
    const long long n = run / (shape.conv_height * row_runs);
    const int row = run / row_runs % shape.conv_height;
    const int column = run % row_runs * RUN;
    const Source* image = x + n * CHANNELS * shape.height * shape.width;

    float sums[RUN][FILTERS_EACH] = {};
#pragma unroll 1
    for (int c = 0; c < CHANNELS; ++c)
#pragma unroll 1
        for (int r = 0; r < FILTER_HEIGHT; ++r) {
            float window[WINDOW];
#pragma unroll
            for (int i = 0; i < WINDOW; ++i)
                window[i] = pixel_at(image, c, row - shape.pad_h + r, column - shape.pad_w + i, shape);
#pragma unroll
            for (int s = 0; s < FILTER_WIDTH; ++s) {
                const int tap = c * TAPS + r * FILTER_WIDTH + s;
                float w[FILTERS_EACH];
#pragma unroll
                for (int k = 0; k < FILTERS_EACH; k += WIDE) {
#if CONSTANT_WEIGHTS > 0
                // Sums past the last filter are never stored: any weight will do.
#pragma unroll
                    for (int e = 0; e < WIDE; ++e)
                        w[k + e] = to_float(
                            constant_weights[min(first_filter + k + e, shape.filters - 1) * CHANNELS * TAPS + tap]);
#else
                    const Pack<float, WIDE> pack = load_pack<float, WIDE>(weights + tap * FILTERS_EACH + k);
#pragma unroll
                    for (int e = 0; e < WIDE; ++e) w[k + e] = pack.at[e];
#endif
                }
#pragma unroll
                for (int i = 0; i < RUN; ++i)
#pragma unroll
                    for (int k = 0; k < FILTERS_EACH; ++k) sums[i][k] += window[i + s] * w[k];
            }
        }

    const int pixels = shape.conv_height * shape.conv_width;
    Element* target = y + n * shape.filters * pixels;
#pragma unroll
    for (int i = 0; i < RUN; ++i)
#pragma unroll
        for (int k = 0; k < FILTERS_EACH; ++k) {
            const int filter = first_filter + k;
            if (column + i >= shape.conv_width || filter >= shape.filters) continue;
            target[output_offset(filter, row * shape.conv_width + column + i, shape.filters, pixels)] =
                finish<HAS_BIAS, false, HAS_RELU, Element>(sums[i][k], bias, filter, nullptr, 0);
        }
}
