// y[n][p][c] = activated((x[n][p][c] - mean) / sqrt(variance + epsilon) * weight[c] + bias[c])
//
// Persistent CTAs keep one or a few adjacent groups of an image in smem, while cp.async copies those of their next image to
// a second buffer: loads are always in flight, and registers do not limit the CTAs of an SM. A thread reads back only
// what it has copied itself. Limiter: memory, each element is read and written once.
//
// Rung: `staged`. Read group_norm.cuh (groups of a CTA).
#include "group_norm/group_norm.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int STEPS = 32;         // config.steps: pixels per thread
constexpr int BLOCKS_PER_SM = 2;  // blocks_per_sm
#endif

constexpr int STAGE = STEPS * THREADS;  // packs

// The pixels of this thread, HEIGHT apart.
struct Pixels {
    const int row = threadIdx.x / WIDTH, pack = threadIdx.x % WIDTH;
    const int mine;

    __device__ __forceinline__ explicit Pixels(int pixels)
        : mine(row < HEIGHT && row < pixels ? (pixels - row + HEIGHT - 1) / HEIGHT : 0) {}

    __device__ __forceinline__ void copy(Values* slots, const Element* from, int pitch) const {
        from += 1LL * row * pitch + pack * VECTOR;
        u32 to = shared_address(slots);
        for (int i = 0; i < mine; ++i, from += 1LL * HEIGHT * pitch, to += THREADS * sizeof(Values)) {
            if constexpr (sizeof(Values) == 16) copy_async_16(to, from, true);
            if constexpr (sizeof(Values) == 8) copy_async_8(to, from, true);
            if constexpr (sizeof(Values) == 4) copy_async_4(to, from, true);
        }
    }

    __device__ __forceinline__ void measure(Part (&parts)[UNITS], const Values* slots) const {
        float count = 0.f, means[VECTOR] = {}, squares[VECTOR] = {};
        const Element* from = slots->at;
        int at = 0;
        for (; at + PACKS <= mine; at += PACKS)
            take_rows<PACKS>(from + at * THREADS * VECTOR, THREADS * VECTOR, count, means, squares);
        for (; at < mine; ++at) take_rows<1>(from + at * THREADS * VECTOR, THREADS * VECTOR, count, means, squares);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            Moments all{};
#pragma unroll
            for (int e = unit * UNIT; e < (unit + 1) * UNIT; ++e) all = merged(all, {count, means[e], squares[e]});
            parts[unit] = {all.mean, all.squares};
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    group_norm_staged(const Element* x, const Parameter* weight, const Parameter* bias, Result* y, int images,
                      int pixels, int x_pitch, int y_pitch, float epsilon, float* mean, float* rstd) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Values* const stages = shared_part(reinterpret_cast<Values*>(shared_memory), REST);
    __shared__ Statistic statistics[GROUPS];
    wait_for_previous_launch();
    const int channel = blockIdx.y * WIDTH * VECTOR;
    const Pixels own(pixels);
    const long long image_of_x = 1LL * pixels * x_pitch;
    Values* slots = stages + threadIdx.x;
    own.copy(slots, x + blockIdx.x * image_of_x + channel, x_pitch);
    copy_async_commit();
    int stage = 0;
    for (int image = blockIdx.x; image < images; image += gridDim.x, stage ^= 1) {
        slots = stages + stage * STAGE + threadIdx.x;
        const int next = image + gridDim.x;
        if (next < images)
            own.copy(stages + (stage ^ 1) * STAGE + threadIdx.x, x + next * image_of_x + channel, x_pitch);
        copy_async_commit();
        copy_async_wait<1>();
        Part parts[UNITS];
        own.measure(parts, slots);
        merge_threads(parts, pixels, [&](int group, const Moments& found) {
            statistics[group] = statistic_of(found, epsilon);
            Statistics{mean, rstd}.write(image, group, statistics[group]);
        });
        __syncthreads();
        if (own.mine == 0) continue;
        const Channels channels(statistics, own.pack, channel + own.pack * VECTOR, weight, bias);
        const Planes planes(image, weight, bias);
        Result* to = y + 1LL * image * pixels * y_pitch + channel + 1LL * own.row * y_pitch + own.pack * VECTOR;
#pragma unroll 2
        for (int i = 0; i < own.mine; ++i, to += 1LL * HEIGHT * y_pitch)
            store_pack(to, channels.normalized(slots[i * THREADS], planes, own.row + i * HEIGHT));
    }
}
