// y[n][c] = gate(sum over s of gate_weight[c][s] * activation(sum over k of weight[s][k] * mean[n][k] + bias[s])
//                + gate_bias[c]), where mean[n][k] is the mean of x[n][pixel][k] over the pixels
//
// The first layer is linear in the pixels: a CTA that has summed some pixels of some channels multiplies these sums by
// its columns of the weight, and only the products are exchanged. The CTAs of a cluster have IMAGES images in SLICES
// slices of channels and PARTS parts of pixels. Each CTA
//   1. copies all weights that it needs into smem by cp.async: before the previous launch ends if EARLY, else after its
//   first loads of pixels;
//   2. sums the pixels of its part and slice, up to AHEAD loads per thread in flight;
//   3. multiplies the sums by its columns of the first weight: a part of every squeezed feature;
//   4. pushes these into the smem of every CTA of the cluster;
//   5. reduces the received parts and applies the activation;
//   6. multiplies by its rows of the second weight: the gates of its SHARE of the channels.
// One DSMEM exchange, no cluster-wide barrier, and no wait for a load of weights. Nothing is rounded on the way, and
// sums have a fixed order. Limiter: one round trip for x and one between the CTAs; for large x, memory.
//
// Rung: `sliced`. Read common/pixel_sums.cuh (sums), products.cuh (products of both layers), tensor_products.cuh (the
// same for many images, TENSOR_CORES), layers.cuh (activations).
#include "squeeze_excite/layers.cuh"
#if TENSOR_CORES

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int CHANNELS = 32;                        // problem.channels
constexpr int SQUEEZED = 8;                         // problem.squeezed
constexpr int PIXELS = 35;                          // problem.pixels
constexpr int THREADS = 256;                        // config.threads
constexpr int VECTOR = 4;                           // vector
constexpr int SQUEEZED_VECTOR = 4;                  // squeezed_vector
constexpr int GATE_UNIT = 4;                        // gate_unit: vector width of the second weight
constexpr bool EARLY = true;                        // early: may start before the previous launch has finished
constexpr int IMAGES = 1;                           // config.images: per cluster
constexpr int SLICES = 1;                           // config.slices: of channels
constexpr int PARTS = 1;                            // config.parts: of pixels
#define CLUSTER 1                                   // config.cluster
#define TENSOR_CORES 0                              // int(config.tensor_cores)
constexpr float LARGEST = 3.4028234663852886e+38f;  // largest: largest finite value of the dtype
constexpr int WIDTH = 32;                           // config.width(problem): channels per slice
constexpr int SHARE = 32;                           // config.share(problem): channels whose gates one CTA computes
constexpr int WEIGHT_PITCH = 32;                    // config.weight_pitch(problem)
constexpr int TEAM = 8;                             // config.team(problem.squeezed, config.width(problem) // vector): lanes per sum of the first layer
constexpr int GATE_TEAM = 2;                        // config.team(config.share(problem), problem.squeezed // squeezed_vector): of the second layer
#endif

#include "squeeze_excite/tensor_products.cuh"
#else
#include "squeeze_excite/products.cuh"
#endif
#include "common/pixel_sums.cuh"
#if CLUSTER > 1
#include "common/hopper.cuh"
#endif

constexpr int PER_PART = (PIXELS + PARTS - 1) / PARTS;
constexpr int HIDDEN = (SQUEEZED + 3) / 4 * 4;  // squeezed features, padded to whole accesses

// Copies the first `units` of UNITS units of UNIT elements of every row into smem, by cp.async unless a unit is too
// short.
template <int UNIT, int UNITS>
__device__ __forceinline__ void stage(Element* to, int to_pitch, const Element* from, int from_pitch, int rows,
                                      int units) {
#pragma unroll 1  // code that runs once must be fetched first
    for (int at = threadIdx.x; at < rows * UNITS; at += THREADS) {
        const int row = at / UNITS, unit = at % UNITS;
        if (unit >= units) continue;
        Element* there = to + row * to_pitch + unit * UNIT;
        const Element* here = from + row * from_pitch + unit * UNIT;
        if constexpr (UNIT * sizeof(Element) == 16)
            copy_async_16(shared_address(there), here, true);
        else if constexpr (UNIT * sizeof(Element) == 8)
            copy_async_8(shared_address(there), here, true);
        else if constexpr (UNIT * sizeof(Element) == 4)
            copy_async_4(shared_address(there), here, true);
        else
            store_pack(there, load_pack<Element, UNIT>(here));
    }
}

// Input of a layer: rows of `depth` values, one per image.
struct Factors {
#if TENSOR_CORES
    Halves at;
    int pitch;

    __device__ __forceinline__ static Factors allocated(unsigned char*& next, int depth) {
        const int pitch = spread(depth);
        Element* high = take<Element>(next, IMAGES * pitch);
        return {{high, take<Element>(next, IMAGES * pitch)}, pitch};
    }
    __device__ __forceinline__ void store(int image, int k, float value) const { at.store(image * pitch + k, value); }
    template <int COUNT, int LANES_OF_A_ROW, class Found>
    __device__ __forceinline__ void times(const Element* weight, int weight_pitch, int rows, int depth,
                                          Found found) const {
        multiply_by_mma(weight, weight_pitch, rows, depth, at, pitch, found);
    }
#else
    float* at;
    int pitch;

    __device__ __forceinline__ static Factors allocated(unsigned char*& next, int depth) {
        return {take<float>(next, IMAGES * depth), depth};
    }
    __device__ __forceinline__ void store(int image, int k, float value) const { at[image * pitch + k] = value; }
    template <int COUNT, int LANES_OF_A_ROW, class Found>
    __device__ __forceinline__ void times(const Element* weight, int weight_pitch, int rows, int depth,
                                          Found found) const {
        multiply<COUNT, LANES_OF_A_ROW>(weight, weight_pitch, rows, depth / COUNT, at, pitch, found);
    }
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    squeeze_excite_sliced(const Element* x, const Element* __restrict__ weight,
                          const Element* __restrict__ bias, const Element* __restrict__ gate_weight,
                          const Element* __restrict__ gate_bias, Element* __restrict__ y, int batch, int x_pitch,
                          int weights_ready) {
    extern __shared__ __align__(16) unsigned char shared[];
    unsigned char* next = shared;
    float* sums_of_groups = take<float>(next, IMAGES * SUMS * WIDTH);
    const Factors means = Factors::allocated(next, WIDTH);                           // of this CTA's pixels only
    float* found = take<float>(next, IMAGES * HIDDEN);                               // products of this CTA
    float* pushed = take<float>(next, CLUSTER > 1 ? CLUSTER * IMAGES * HIDDEN : 0);  // of all CTAs
    const Factors hidden = Factors::allocated(next, HIDDEN);
    Element* columns_of_weight = take<Element>(next, SQUEEZED * WEIGHT_PITCH);
    Element* rows_of_gate = take<Element>(next, SHARE * SQUEEZED);
    Element* some_bias = take<Element>(next, SQUEEZED);
    Element* some_gate_bias = take<Element>(next, SHARE);

    const int rank = blockIdx.x % CLUSTER, first_image = blockIdx.x / CLUSTER * IMAGES;
    const int slice = rank % SLICES, part = rank / SLICES;
    const int columns = min(COLUMNS, CHANNELS / VECTOR - slice * COLUMNS);
    const int first_channel = rank * SHARE, channels = max(0, min(SHARE, CHANNELS - first_channel));
    const int pixels = min(PER_PART, PIXELS - part * PER_PART);

#if CLUSTER > 1
    __shared__ __align__(8) u64 all_pushed;
    const u32 barrier = shared_address(&all_pushed);
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) barrier_expect(barrier, CLUSTER * IMAGES * HIDDEN * sizeof(float));
    cluster_arrive_relaxed();
#endif
    constexpr int FEATURE_UNITS = SQUEEZED / SQUEEZED_VECTOR;
    const auto stage_weights = [&] {
        stage<VECTOR, COLUMNS>(columns_of_weight, WEIGHT_PITCH, weight + slice * WIDTH, CHANNELS, SQUEEZED, columns);
        copy_async_commit();
        stage<GATE_UNIT, SHARE * SQUEEZED / GATE_UNIT>(rows_of_gate, 0, gate_weight + first_channel * SQUEEZED, 0, 1,
                                                       channels * SQUEEZED / GATE_UNIT);
        if (HAS_BIAS) stage<SQUEEZED_VECTOR, FEATURE_UNITS>(some_bias, 0, bias, 0, 1, FEATURE_UNITS);
        if (HAS_GATE_BIAS)
            stage<VECTOR, SHARE / VECTOR>(some_gate_bias, 0, gate_bias + first_channel, 0, 1, channels / VECTOR);
        copy_async_commit();
    };
    if (EARLY) {
        if (!weights_ready) wait_for_previous_launch();
        stage_weights();
    }
    if (HIDDEN > SQUEEZED)
#pragma unroll 1
        for (int at = threadIdx.x; at < IMAGES * HIDDEN; at += THREADS)
            if (at % HIDDEN >= SQUEEZED) found[at] = 0.f;
    wait_for_previous_launch();  // returns at once if already waited for

    sum_slice(sums_of_groups, x + 1LL * part * PER_PART * x_pitch + slice * WIDTH, first_image, batch, columns, pixels,
              PIXELS - 1 - part * PER_PART, x_pitch, [&] {
                  if (!EARLY) stage_weights();
              });
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < IMAGES * WIDTH; at += THREADS) {
        const int image = at / WIDTH, channel = at - image * WIDTH;
        float sum = 0.f;
#pragma unroll 16
        for (int i = 0; i < SUMS; ++i) sum += sums_of_groups[(image * SUMS + i) * WIDTH + channel];
        means.store(image, channel, sum * (1.f / PIXELS));
    }
    copy_async_wait<1>();
    __syncthreads();
    means.times<VECTOR, TEAM>(columns_of_weight, WEIGHT_PITCH, SQUEEZED, columns * VECTOR,
                              [&](int row, int image, float sum) { found[image * HIDDEN + row] = sum; });
    __syncthreads();

#if CLUSTER > 1
    cluster_wait();  // all CTAs have started and initialized their barrier
#pragma unroll 1
    for (int at = threadIdx.x; at < CLUSTER * IMAGES * HIDDEN / 4; at += THREADS) {
        const int to = at / (IMAGES * HIDDEN / 4), quad = at - to * (IMAGES * HIDDEN / 4);
        const auto some = load_pack<float, 4>(found + 4 * quad);
        push_cluster(shared_address(pushed + rank * IMAGES * HIDDEN + 4 * quad), barrier, to,
                     {some.at[0], some.at[1], some.at[2], some.at[3]});
    }
    barrier_wait(barrier, 0);
    const float* parts = pushed;
#else
    const float* parts = found;
#endif
    copy_async_wait<0>();
    __syncthreads();  // biases were copied by all threads
#pragma unroll 1
    for (int at = threadIdx.x; at < IMAGES * HIDDEN; at += THREADS) {
        const int image = at / HIDDEN, feature = at % HIDDEN;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i) sum += parts[i * IMAGES * HIDDEN + at];
        if (feature < SQUEEZED) hidden.store(image, feature, squeezed(sum, some_bias, feature));
    }
    __syncthreads();
    hidden.times<SQUEEZED_VECTOR, GATE_TEAM>(
        rows_of_gate, SQUEEZED, channels, SQUEEZED,
        [&](int row, int image, float sum) {
            if (first_image + image < batch)
                y[1LL * (first_image + image) * CHANNELS + first_channel + row] = gated(sum, some_gate_bias, row);
        });
}
