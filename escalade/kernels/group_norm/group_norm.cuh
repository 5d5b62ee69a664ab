// Groups of channels covered by a CTA, and the normalization of their elements: activated((x - mean) * scale * weight +
// bias), scale = 1 / sqrt(variance + epsilon).
//
// A CTA is WIDTH packs of VECTOR channels wide, whole groups, and HEIGHT pixels high. A thread keeps the channels of
// its pack, and sums those of one group itself: UNIT channels, the greatest common divisor of packs and groups, so that
// a pack is UNITS units and a group GROUP_UNITS, whichever is larger.
//
// In NCHW a group of an image is contiguous. It is treated as an image of its own, of one pack of channels and as many
// pixels as it has packs; if there is a weight or a bias, PLANE is the number of elements of each of its ROW_CHANNELS.
#pragma once

#include "common/moments.cuh"
#include "group_norm/planes.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;          // span.vector: channels per access
constexpr int WIDTH = 8;           // span.packs: packs of channels per CTA
constexpr int UNIT = 4;            // span.unit: channels of one pack and one group
constexpr int GROUP_CHANNELS = 8;  // span.group_channels
constexpr int PACKS = 4;           // config.packs: pixels in flight per thread
constexpr int THREADS = 256;       // config.threads
#endif

using Values = Pack<Element, VECTOR>;
using Results = Pack<Result, VECTOR>;
constexpr int HEIGHT = THREADS / WIDTH;
constexpr int UNITS = VECTOR / UNIT, GROUP_UNITS = GROUP_CHANNELS / UNIT;
constexpr int GROUPS = WIDTH * VECTOR / GROUP_CHANNELS;
static_assert(GROUPS * GROUP_CHANNELS == WIDTH * VECTOR, "a CTA covers whole groups");

__device__ constexpr int lanes_of_a_group() {
    int lanes = 32;
    while (lanes > 1 && lanes * GROUPS > THREADS) lanes /= 2;
    return lanes;
}

struct Part {
    float mean, squares;
};
struct Statistic {
    float mean, scale;
};

// Optional results: mean and reciprocal deviation of each group of each image.
struct Statistics {
    float *mean, *rstd;

    // `group` is within the CTA's groups, of the image or row of this number.
    __device__ __forceinline__ void write(int image, int group, const Statistic& found) const {
        if (!HAS_STATISTICS) return;
        const long long at = 1LL * image * GROUPS * gridDim.y + blockIdx.y * GROUPS + group;
        mean[at] = found.mean, rstd[at] = found.scale;
    }
};

// Calls put(group, moments) with each group's moments, merged from at(group, entry) for `entries` entries in a fixed
// order, so that every run gives the same bits.
template <class At, class Put>
__device__ __forceinline__ void merge_groups(int entries, At at, Put put) {
    constexpr int LANES = lanes_of_a_group();
    const int lane = threadIdx.x % LANES;
    for (int first = 0; first < GROUPS; first += THREADS / LANES) {
        const int group = first + threadIdx.x / LANES;
        Moments mine{};
        if (group < GROUPS)
            for (int entry = lane; entry < entries; entry += LANES) mine = merged(mine, at(group, entry));
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2)
            mine = merged(mine, {__shfl_down_sync(ALL_LANES, mine.count, distance),
                                 __shfl_down_sync(ALL_LANES, mine.mean, distance),
                                 __shfl_down_sync(ALL_LANES, mine.squares, distance)});
        if (lane == 0 && group < GROUPS) put(group, mine);
    }
}

// The same from the threads' own moments, over the CTA's `pixels`.
template <class Put>
__device__ __forceinline__ void merge_threads(const Part (&mine)[UNITS], int pixels, Put put) {
    __shared__ Part parts[UNITS][THREADS];
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) parts[unit][threadIdx.x] = mine[unit];
    __syncthreads();
    merge_groups(
        min(HEIGHT, pixels) * GROUP_UNITS,
        [&](int group, int entry) {
            const int row = entry / GROUP_UNITS, unit = group * GROUP_UNITS + entry % GROUP_UNITS;
            const Part& part = parts[unit % UNITS][row * WIDTH + unit / UNITS];
            const int rows = (pixels - row + HEIGHT - 1) / HEIGHT;
            return Moments{static_cast<float>(rows * UNIT), part.mean, part.squares};
        },
        put);
}

__device__ __forceinline__ Statistic statistic_of(const Moments& group, float epsilon) {
    return {group.mean, rsqrtf(group.squares / group.count + epsilon)};
}

// A thread's per-channel values.
struct Channels {
    float means[UNITS], factors[VECTOR], terms[VECTOR];

    // `pack` within the CTA, `channel` its first in the image.
    __device__ __forceinline__ Channels(const Statistic* statistics, int pack, int channel, const Parameter* weight,
                                        const Parameter* bias) {
        Pack<Parameter, VECTOR> weights = {}, biases = {};
        if (HAS_WEIGHT && !PLANE) weights = load_pack<Parameter, VECTOR>(weight + channel);
        if (HAS_BIAS && !PLANE) biases = load_pack<Parameter, VECTOR>(bias + channel);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const Statistic& of = statistics[(pack * VECTOR + e) / GROUP_CHANNELS];
            means[e / UNIT] = of.mean;
            factors[e] = HAS_WEIGHT && !PLANE ? of.scale * to_float(weights.at[e]) : of.scale;
            terms[e] = HAS_BIAS && !PLANE ? to_float(biases.at[e]) : 0.f;
        }
    }

    // `planes` are those of the image, `pixel` is within it.
    __device__ __forceinline__ Results normalized(const Values& values, const Planes& planes, int pixel) const {
        Results results;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            float value = (to_float(values.at[e]) - means[e / UNIT]) * factors[e];
            if (PLANE) value = planes.scaled(value, pixel * VECTOR + (PLANE % VECTOR ? e : 0));  // one plane per pack
            if (HAS_BIAS && !PLANE) value += terms[e];
            results.at[e] = from_float<Result>(activated<HAS_RELU>(value));
        }
        return results;
    }
};
