// y[n][c] = mean of x[n][pixel][c] over all pixels of an image                                                 (NHWC)
//
// A block has a slice of WIDTH channels and one of PARTS parts of the pixels of an image. Sizes are known when it is
// compiled: no index needs a division, and all of a thread's loads are under way at once, or AHEAD of them where there
// are more. The blocks of a cluster have the parts of one slice, and push their sums into the shared memory of the
// first. What bounds it: memory, or with small images the time of one round trip, and one between the blocks.
//
// Serves `sliced`. common/pixel_sums.cuh has the sums of a block.
#include "common/pixel_sums.cuh"
#if PARTS > 1
#include "common/hopper.cuh"
#endif

constexpr int PER_PART = (PIXELS + PARTS - 1) / PARTS;
constexpr int PADDED = (WIDTH + 3) / 4 * 4;  // channels, and none up to whole accesses

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    adaptive_avg_pool2d_sliced(const Element* x, Element* __restrict__ y, int batch, int x_pitch,
                               int y_pitch) {
    extern __shared__ __align__(16) unsigned char shared[];
    unsigned char* next = shared;
    float* sums_of_groups = take<float>(next, SUMS * WIDTH);
    float* found = take<float>(next, PADDED);          // sums of this block
    float* pushed = take<float>(next, PARTS * PADDED);  // of all blocks, in the first

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
            means[channel] = from_float<Element>(sum / PIXELS);
    }
#if PARTS > 1
    __syncthreads();
    cluster_wait();  // the first block has begun, and has its barrier
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
        means[channel] = from_float<Element>(sum / PIXELS);
    }
#endif
}
