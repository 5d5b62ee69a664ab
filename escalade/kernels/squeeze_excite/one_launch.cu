// y[n][c] = gate(sum over s of gate_weight[c][s] * activation(sum over k of weight[s][k] * mean[n][k] + bias[s])
//                + gate_bias[c]), where mean[n][k] is the mean of x[n][pixel][k] over the pixels
//
// A cluster of CLUSTER CTAs has IMAGES images and reads the weights once for all of them. Each CTA
//   1. sums its share of the pixels, for all channels: GROUPS threads per pack of channels, AHEAD loads in flight;
//   2. reduces the sums of all CTAs for its SHARE of the channels, through DSMEM;
//   3. multiplies these means by its columns of the first weight: a part of every squeezed feature;
//   4. reduces the parts of all CTAs (redundantly in every CTA) and applies the activation;
//   5. multiplies by its rows of the second weight: the gates of its channels.
// No weight is read twice in a cluster, and there are two cluster barriers. Nothing is rounded on the way, and sums
// have a fixed order. Limiter: latency of a few round trips; for large x, memory.
//
// Rungs: `one_block`, `cluster`. Read products.cuh (products of both layers), layers.cuh (activations).
#include "squeeze_excite/layers.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int CHANNELS = 32;        // problem.channels
constexpr int SQUEEZED = 8;         // problem.squeezed
constexpr int PIXELS = 35;          // problem.pixels
constexpr int THREADS = 512;        // config.threads
constexpr int VECTOR = 4;           // vector
constexpr int SQUEEZED_VECTOR = 4;  // squeezed_vector
constexpr int IMAGES = 1;           // config.images: per cluster
#define CLUSTER 1                   // config.cluster: CTAs that share an image
constexpr int SHARE = 32;           // config.share(problem): channels per CTA
constexpr int GROUPS = 35;          // config.groups(problem): threads per pack of channels
constexpr int AHEAD = 8;            // ahead: pixels in flight per thread
constexpr int TEAM = 32;            // config.team(problem.squeezed): lanes per sum of the first layer
constexpr int GATE_TEAM = 16;       // config.team(config.share(problem)): lanes per sum of the second layer
#endif

#include "squeeze_excite/products.cuh"
#if CLUSTER > 1
#include "common/hopper.cuh"
#endif

constexpr int CHUNKS = CHANNELS / VECTOR;
constexpr int COLUMNS = CHUNKS < THREADS ? CHUNKS : THREADS;  // packs of channels summed at once
constexpr int PER_BLOCK = (PIXELS + CLUSTER - 1) / CLUSTER;
constexpr int WIDTH = SHARE * CLUSTER;          // channels, padded to whole shares
constexpr int HIDDEN = (SQUEEZED + 3) / 4 * 4;  // squeezed features, padded to whole accesses
using Values = Pack<Element, VECTOR>;
using Floats = Pack<float, 4>;

#if CLUSTER > 1
__device__ __forceinline__ void sync_cluster() { cluster_sync(); }
#else
__device__ __forceinline__ void sync_cluster() { __syncthreads(); }
#endif

// Four sums, each over all CTAs' values at this smem address.
__device__ __forceinline__ Floats sum_of_all(const float* own) {
#if CLUSTER > 1
    float4 parts[CLUSTER];
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) parts[rank] = load_cluster(shared_address(own), rank);
    Floats sum{};
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) {
        sum.at[0] += parts[rank].x, sum.at[1] += parts[rank].y;
        sum.at[2] += parts[rank].z, sum.at[3] += parts[rank].w;
    }
    return sum;
#else
    return load_pack<float, 4>(own);
#endif
}

// Sums over this CTA's pixels of one image, per group of threads: parts[GROUPS][CHANNELS].
__device__ __forceinline__ void sum_pixels(float* parts, const Element* pixels, int count, int x_pitch) {
    const int group = threadIdx.x / COLUMNS;
    if (group >= GROUPS) return;
    for (int chunk = threadIdx.x % COLUMNS; chunk < CHUNKS; chunk += COLUMNS) {
        const Element* column = pixels + chunk * VECTOR;
        float sums[VECTOR] = {};
        for (int pixel = group; pixel < count; pixel += GROUPS * AHEAD) {
            Values loaded[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                if (pixel + i * GROUPS < count)
                    loaded[i] = load_pack<Element, VECTOR>(column + 1LL * (pixel + i * GROUPS) * x_pitch);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                if (pixel + i * GROUPS < count)
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) sums[e] += to_float(loaded[i].at[e]);
        }
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) parts[group * CHANNELS + chunk * VECTOR + e] = sums[e];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    squeeze_excite_one_launch(const Element* __restrict__ x, const Element* __restrict__ weight,
                              const Element* __restrict__ bias, const Element* __restrict__ gate_weight,
                              const Element* __restrict__ gate_bias, Element* __restrict__ y, int batch, int x_pitch) {
    extern __shared__ __align__(16) float shared[];
    constexpr int MEANS = IMAGES * WIDTH, PARTS_OF_HIDDEN = MEANS + IMAGES * SHARE;
    constexpr int HIDDEN_AT = PARTS_OF_HIDDEN + IMAGES * HIDDEN, PARTS_AT = HIDDEN_AT + IMAGES * HIDDEN;
    float* totals = shared_part(shared, MEANS);                  // [IMAGES][WIDTH], of this CTA's pixels
    float* means = shared_part(shared + MEANS, IMAGES * SHARE);  // [IMAGES][SHARE], of this CTA's channels
    float* parts_of_hidden = shared_part(shared + PARTS_OF_HIDDEN, IMAGES * HIDDEN);  // of this CTA's channels
    float* hidden = shared_part(shared + HIDDEN_AT, IMAGES * HIDDEN);
    float* parts = shared_part(shared + PARTS_AT, REST);  // [IMAGES][GROUPS][CHANNELS]

    const int rank = blockIdx.x % CLUSTER, first_image = blockIdx.x / CLUSTER * IMAGES;
    const int first_channel = rank * SHARE;
    const int channels = max(0, min(SHARE, CHANNELS - first_channel));
    const int first_pixel = rank * PER_BLOCK;
    const int pixels = max(0, min(PER_BLOCK, PIXELS - first_pixel));
    wait_for_previous_launch();

#pragma unroll
    for (int i = 0; i < IMAGES; ++i) {  // past the last image, repeats it
        const long long image = min(first_image + i, batch - 1);
        sum_pixels(parts + i * GROUPS * CHANNELS, x + (image * PIXELS + first_pixel) * x_pitch, pixels, x_pitch);
    }
    __syncthreads();
    for (int at = threadIdx.x; at < IMAGES * WIDTH; at += THREADS) {
        const int image = at / WIDTH, channel = at % WIDTH;
        float sum = 0.f;
        if (channel < CHANNELS)
#pragma unroll 8
            for (int g = 0; g < GROUPS; ++g) sum += parts[(image * GROUPS + g) * CHANNELS + channel];
        totals[at] = sum;
    }
    sync_cluster();

    for (int at = threadIdx.x; at < IMAGES * SHARE / 4; at += THREADS) {
        const int image = at / (SHARE / 4), quad = at % (SHARE / 4);
        Floats sum = sum_of_all(totals + image * WIDTH + first_channel + 4 * quad);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.at[e] /= PIXELS;
        store_pack(means + image * SHARE + 4 * quad, sum);
    }
    if (HIDDEN > SQUEEZED)
        for (int at = threadIdx.x; at < IMAGES * HIDDEN; at += THREADS)
            if (at % HIDDEN >= SQUEEZED) parts_of_hidden[at] = 0.f;
    __syncthreads();
    multiply<VECTOR, TEAM>(weight + first_channel, CHANNELS, SQUEEZED, channels / VECTOR, means, SHARE,
                           [&](int row, int image, float sum) { parts_of_hidden[image * HIDDEN + row] = sum; });
    sync_cluster();

    for (int at = threadIdx.x; at < IMAGES * HIDDEN / 4; at += THREADS) {
        const int feature = 4 * at % HIDDEN;
        const Floats sum = sum_of_all(parts_of_hidden + 4 * at);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (feature + e < SQUEEZED) hidden[4 * at + e] = squeezed(sum.at[e], bias, feature + e);
    }
#if CLUSTER > 1
    cluster_arrive();  // no more DSMEM reads from here on
#endif
    __syncthreads();
    multiply<SQUEEZED_VECTOR, GATE_TEAM>(
        gate_weight + first_channel * SQUEEZED, SQUEEZED, channels, SQUEEZED / SQUEEZED_VECTOR, hidden, HIDDEN,
        [&](int row, int image, float sum) {
            const int channel = first_channel + row;
            if (first_image + image < batch)
                y[1LL * (first_image + image) * CHANNELS + channel] = gated(sum, gate_bias, channel);
        });
#if CLUSTER > 1
    cluster_wait();  // stay until others have read this CTA's smem
#endif
}
