// y[row][output] = relu(sum over k of mean[row][k] * weight[output][k] + bias[output]), for a few rows, where
// mean[row][k] is the mean of x[row][pixel][k] over the pixels, rounded to Element
//
// Global average pooling and the layer after it: as two launches, each takes longer to start than to run. Here every
// CTA computes the means of all features itself. A feature's pixels are distributed over GROUPS threads, each with up
// to AHEAD loads of VECTOR features in flight, and reduced in smem. Each warp then has OUTPUTS outputs, whose weights
// it loaded into registers first, before the previous launch ends if they are ready (PDL). Limiter: x from L2, since
// each CTA reads all of it, its conversion to fp32, and one round trip.
//
// Rung: `pooled`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
using Stored = float;             // problem.stored: elements of x
constexpr bool HAS_BIAS = true;   // problem.bias
constexpr bool HAS_RELU = false;  // problem.relu
constexpr int FEATURES = 64;      // problem.in_features
constexpr int PIXELS = 49;        // problem.pixels
constexpr int ROWS = 1;           // problem.batch
constexpr int VECTOR = 4;         // vector
constexpr int THREADS = 512;      // config.threads
constexpr int GROUPS = 16;        // groups
constexpr int AHEAD = 3;          // ahead
constexpr int OUTPUTS = 1;        // config.outputs: output features per warp
#endif

#include "common/quantized_input.cuh"
#include "common/epilogue.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"

constexpr int CHUNKS = FEATURES / VECTOR;  // loads per row
constexpr int PACKS = (CHUNKS + 31) / 32;  // of them, those that a lane multiplies
constexpr int LANES = CHUNKS < THREADS ? CHUNKS : THREADS;
constexpr int STORED = VECTOR < 4 ? VECTOR : 4;  // floats per widest access
using Values = Pack<Element, VECTOR>;

// COUNT pixels, GROUPS apart, all in flight.
template <int COUNT>
__device__ __forceinline__ void add_pixels(float (&sums)[VECTOR], const Stored* column) {
    Pack<Stored, VECTOR> packs[COUNT > 0 ? COUNT : 1];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) packs[i] = load_pack<Stored, VECTOR>(column + 1LL * i * GROUPS * FEATURES);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) add_pack(sums, packs[i]);
}

// A thread's sums over its pixels of one image. Pixels that all groups have need no check; the extra one of some groups
// is loaded first.
__device__ __forceinline__ void sum_pixels(float (&sums)[VECTOR], const Stored* column, int group) {
    constexpr int ALL = PIXELS / GROUPS, SOME = PIXELS % GROUPS;
    column += 1LL * group * FEATURES;
    Pack<Stored, VECTOR> last = {};
    if (group < SOME) last = load_pack<Stored, VECTOR>(column + 1LL * ALL * GROUPS * FEATURES);
#pragma unroll 1
    for (int i = 0; i < ALL / AHEAD; ++i) add_pixels<AHEAD>(sums, column + 1LL * i * AHEAD * GROUPS * FEATURES);
    add_pixels<ALL % AHEAD>(sums, column + 1LL * (ALL - ALL % AHEAD) * GROUPS * FEATURES);
    add_pack(sums, last);
}

// Means of every row, by all threads of the CTA.
__device__ __forceinline__ void take_means(Element (*means)[FEATURES], float (*parts)[GROUPS][FEATURES],
                                           const Stored* x, const float* scale) {
    const int group = threadIdx.x / LANES;
    if (group < GROUPS) {
#pragma unroll 1
        for (int row = 0; row < ROWS; ++row)
            for (int chunk = threadIdx.x % LANES; chunk < CHUNKS; chunk += LANES) {
                float sums[VECTOR] = {};
                sum_pixels(sums, x + 1LL * row * PIXELS * FEATURES + chunk * VECTOR, group);
#pragma unroll
                for (int e = 0; e < VECTOR; e += STORED) {
                    Pack<float, STORED> some;
#pragma unroll
                    for (int i = 0; i < STORED; ++i) some.at[i] = sums[e + i];
                    store_pack(&parts[row][group][chunk * VECTOR + e], some);
                }
            }
    }
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < ROWS * FEATURES; at += THREADS) {
        const int row = at / FEATURES, feature = at % FEATURES;
        float sum = 0.f;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) sum += parts[row][g][feature];
        means[row][feature] = from_float<Element>(scaled<Stored>(sum / PIXELS, scale));
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear_pooled(const Stored* x, const Element* weight, const Element* bias, Element* y, int out_features,
                  int weights_ready, const float* __restrict__ scale) {
    extern __shared__ __align__(16) unsigned char shared[];
    float(*parts)[GROUPS][FEATURES] = reinterpret_cast<float(*)[GROUPS][FEATURES]>(shared);
    Element(*means)[FEATURES] = reinterpret_cast<Element(*)[FEATURES]>(parts + ROWS);

    const int lane = threadIdx.x % 32;
    const int first_output = (blockIdx.x * (THREADS / 32) + threadIdx.x / 32) * OUTPUTS;
    // Output of this lane's sum, shared by the lanes up to the next multiple of 32 / OUTPUTS.
    const int output = first_output + lane / (32 / OUTPUTS);

    if (!weights_ready) wait_for_previous_launch();
    Values weights[OUTPUTS][PACKS];  // past the last output, or past a row's end, repeats the last
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o)
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
            weights[o][i] =
                load_pack<Element, VECTOR>(weight + 1LL * min(first_output + o, out_features - 1) * FEATURES +
                                           min(i * 32 + lane, CHUNKS - 1) * VECTOR);
    const float offset = HAS_BIAS ? to_float(bias[min(output, out_features - 1)]) : 0.f;
    wait_for_previous_launch();  // returns at once if already waited for
    take_means(means, parts, x, scale);

#pragma unroll(PACKS * OUTPUTS <= 4 ? ROWS : 1)  // else the weights of all rows are converted at once
    for (int row = 0; row < ROWS; ++row) {
        float sums[OUTPUTS] = {};
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int chunk = i * 32 + lane;
            if (chunk >= CHUNKS) continue;
            const Values inputs = load_pack<Element, VECTOR>(&means[row][chunk * VECTOR]);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
#pragma unroll
                for (int o = 0; o < OUTPUTS; ++o) sums[o] += to_float(inputs.at[e]) * to_float(weights[o][i].at[e]);
        }
        const float sum = warp_sums(sums) + offset;
        if (lane % (32 / OUTPUTS) == 0 && output < out_features)
            y[1LL * row * out_features + output] = from_float<Element>(activated<HAS_RELU>(sum));
    }
}
