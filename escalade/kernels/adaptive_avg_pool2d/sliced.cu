// y[n][c] = mean of x[n][pixel][c] over all pixels of an image                                                 (NHWC)
//
// One CTA per slice of WIDTH channels and one of PARTS parts of an image's pixels. Sizes are compile-time constants: no
// index needs a division, and all of a thread's loads, or AHEAD of them, are in flight at once. The CTAs of a cluster
// have the parts of one slice, and push their sums into the smem of the first. Limiter: memory, or for small images one
// round trip, and one between the CTAs.
//
// Rung: `sliced`. Read common/pixel_sums.cuh (sums of a CTA).
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;         // problem.dtype
using Stored = float;          // problem.stored: elements of x
constexpr int CHANNELS = 512;  // problem.channels
constexpr int PIXELS = 49;     // problem.pixels
constexpr int WIDTH = 32;      // config.width(problem): channels per slice
constexpr int SLICES = 16;     // config.slices(problem)
#define PARTS 1                // config.parts: CTAs per cluster, which share the pixels of an image
constexpr int THREADS = 128;   // config.threads
#endif

#include "common/pixel_sums.cuh"
#if PARTS > 1
#include "common/hopper.cuh"
#endif

constexpr int PER_PART = (PIXELS + PARTS - 1) / PARTS;
constexpr int PADDED = (WIDTH + 3) / 4 * 4;  // channels, padded to whole accesses

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    adaptive_avg_pool2d_sliced(const Stored* x, Element* __restrict__ y, int batch, int x_pitch,
                               int y_pitch, const float* __restrict__ scale) {
    extern __shared__ __align__(16) unsigned char shared[];
    unsigned char* next = shared;
    float* sums_of_groups = take<float>(next, SUMS * WIDTH);
    float* found = take<float>(next, PADDED);           // sums of this CTA
    float* pushed = take<float>(next, PARTS * PADDED);  // of all CTAs, in the first

    const int part = blockIdx.x % PARTS, slice = blockIdx.x / PARTS % SLICES, image = blockIdx.x / (PARTS * SLICES);
    const int columns = min(COLUMNS, CHANNELS / VECTOR - slice * COLUMNS);
    const int pixels = min(PER_PART, PIXELS - part * PER_PART);
#if PARTS > 1
    __shared__ __align__(8) u64 all_pushed;
    const u32 barrier = shared_address(&all_pushed);
    if (threadIdx.x == 0 && part == 0) {
        barrier_init(barrier, 1);
        fence_barrier_init();
        barrier_expect(barrier, PARTS * PADDED * sizeof(float));
    }
    cluster_arrive_relaxed();
#endif
    wait_for_previous_launch();

    sum_slice(sums_of_groups, x + 1LL * part * PER_PART * x_pitch + slice * WIDTH, image, batch, columns, pixels,
              PIXELS - 1 - part * PER_PART, x_pitch, [] {});
    __syncthreads();
    Element* means = y + 1LL * image * y_pitch + slice * WIDTH;
#pragma unroll 1
    for (int channel = threadIdx.x; channel < PADDED; channel += THREADS) {
        float sum = 0.f;
        if (channel < WIDTH)
#pragma unroll 16
            for (int i = 0; i < SUMS; ++i) sum += sums_of_groups[i * WIDTH + channel];
        if (PARTS > 1)
            found[channel] = sum;
        else if (channel < columns * VECTOR)
            means[channel] = from_float<Element>(scaled<Stored>(sum / PIXELS, scale));
    }
#if PARTS > 1
    __syncthreads();
    cluster_wait();  // the first CTA has started and initialized its barrier
    for (int quad = threadIdx.x; quad < PADDED / 4; quad += THREADS) {
        const auto some = load_pack<float, 4>(found + 4 * quad);
        push_cluster(shared_address(pushed + part * PADDED + 4 * quad), barrier, 0,
                     {some.at[0], some.at[1], some.at[2], some.at[3]});
    }
    if (part > 0) return;
    barrier_wait(barrier, 0);
    for (int channel = threadIdx.x; channel < columns * VECTOR; channel += THREADS) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) sum += pushed[i * PADDED + channel];
        means[channel] = from_float<Element>(scaled<Stored>(sum / PIXELS, scale));
    }
#endif
}
