// y[n][p][c] = activated((x[n][p][c] - mean) / sqrt(variance + epsilon) * weight[c] + bias[c])
//
// A block has one group of an image, or a few side by side, in its registers: PACKS pixels of up to 16 bytes a thread,
// all loaded at once. Each thread takes the mean and the squared distances of what it has, and these are merged through
// shared memory. What bounds it: memory, each element read and written once.
//
// Serves `in_registers`. group_norm.cuh has how groups lie under a block.
#include "group_norm/group_norm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    group_norm_in_registers(const Element* x, const Element* weight, const Element* bias, Element* y, int pixels,
                            int x_pitch, int y_pitch, float epsilon) {
    __shared__ Statistic statistics[GROUPS];
    wait_for_previous_launch();
    const int row = threadIdx.x / WIDTH, pack = threadIdx.x % WIDTH;
    const int channel = (blockIdx.y * WIDTH + pack) * VECTOR;
    const int mine = row < HEIGHT && row < pixels ? (pixels - row + HEIGHT - 1) / HEIGHT : 0;  // rows of this thread
    const Element* from = x + (1LL * blockIdx.x * pixels + row) * x_pitch + channel;
    Values loaded[PACKS] = {};
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
        if (i < mine) loaded[i] = load_pack<Element, VECTOR>(from + 1LL * i * HEIGHT * x_pitch);

    Part parts[UNITS];
    const float share = mine ? 1.f / (mine * UNIT) : 0.f;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        float sum = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
#pragma unroll
            for (int e = unit * UNIT; e < (unit + 1) * UNIT; ++e) sum += to_float(loaded[i].at[e]);
        const float mean = sum * share;
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
#pragma unroll
            for (int e = unit * UNIT; e < (unit + 1) * UNIT; ++e) {
                const float distance = to_float(loaded[i].at[e]) - mean;
                if (i < mine) squares += distance * distance;
            }
        parts[unit] = {mean, squares};
    }
    merge_threads(parts, pixels,
                  [&](int group, const Moments& found) { statistics[group] = statistic_of(found, epsilon); });
    __syncthreads();
    if (mine == 0) return;
    const Channels channels(statistics, pack, channel, weight, bias);
    const Planes planes(blockIdx.x, weight, bias);
    Element* to = y + (1LL * blockIdx.x * pixels + row) * y_pitch + channel;
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
        if (i < mine) store_pack(to + 1LL * i * HEIGHT * y_pitch, channels.normalised(loaded[i], planes, row + i * HEIGHT));
}
