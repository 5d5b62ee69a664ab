// A thread's view of its row: target, weight, the sums shared by all its threads, and the loss and gradient computed
// from them.
#pragma once

#include "common/elements.cuh"
#include "common/softmax.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;               // problem.dtype
constexpr int VECTOR = 4;            // vector: elements per access
constexpr bool HAS_GRADIENT = true;  // problem.gradient
constexpr bool SMOOTHED = false;     // problem.smoothing > 0
constexpr bool HAS_IGNORED = true;   // problem.ignored is not None
constexpr bool IS_MEAN = true;       // problem.reduction == "mean"
constexpr bool COUNTS_HERE = true;   // counts_here: each warp counts the rows itself
#endif

using Values = Pack<Element, VECTOR>;

struct Targets {
    const long long* of;   // per row
    const float* counted;  // by the CTAs of rows_count.cu, `counters` of them
    int rows, counters;
    long long ignored;

    // Number of rows that are not ignored; uniform over all lanes.
    __device__ __forceinline__ float counted_rows() const {
        if (!HAS_IGNORED) return rows;
        const int lane = threadIdx.x % 32;
        if (!COUNTS_HERE) return warp_sum(lane < counters ? counted[lane] : 0.f);
        int count = 0;
#pragma unroll 8
        for (int row = lane; row < rows; row += 32) count += of[row] != ignored;
        return warp_sum(count);
    }
};

// Arguments of a launch.
struct Arguments {
    const Element* x;
    Element* gradient;
    const float* scale;
    Targets targets;
    int classes;
    float spread, sure;
};

struct Row {
    const Element* x;
    Element* gradient;
    int packs, thread, target;
    float spread;   // smoothing: probability of each class
    float sure;     // probability of the target besides
    float scale;    // incoming gradient
    bool counts;    // not ignored
    bool is_class;  // the target is a valid class

    __device__ __forceinline__ Row(const Arguments& arguments, long long number, int thread)
        : packs(arguments.classes / VECTOR), thread(thread), spread(SMOOTHED ? arguments.spread : 0.f),
          sure(SMOOTHED ? arguments.sure : 1.f), scale(HAS_GRADIENT ? arguments.scale[0] : 0.f) {
        x = arguments.x + number * arguments.classes;
        gradient = HAS_GRADIENT ? arguments.gradient + number * arguments.classes : nullptr;
        const long long wanted = arguments.targets.of[number];
        is_class = wanted >= 0 && wanted < arguments.classes;
        target = is_class ? static_cast<int>(wanted) : 0;
        counts = !HAS_IGNORED || wanted != arguments.targets.ignored;
    }

    __device__ __forceinline__ void store(int pack, const float (&exponentials)[VECTOR], float over_sum,
                                          float weight) const {
        Values results;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            float derivative = exponentials[e] * over_sum - spread;
            if (pack * VECTOR + e == target) derivative -= sure;
            results.at[e] = from_float<Element>(counts ? derivative * weight : 0.f);
        }
        store_pack(gradient + 1LL * pack * VECTOR, results);
    }
};

// Sums of a row, in all its threads; `total` is the sum of the elements themselves, for smoothing.
struct RowSums {
    SoftmaxSums of;
    float total = 0.f;
    float target_logit = 0.f;  // logit of the target
    float weight = 1.f;  // of the row

    // Call once all loads of the row are in flight: it waits for the targets.
    __device__ __forceinline__ void load_target(const Row& row, const Targets& targets) {
        target_logit = to_float(row.x[row.target]);
        if (IS_MEAN) weight = 1.f / targets.counted_rows();
        if (row.counts && !row.is_class) weight = __int_as_float(0x7FC00000);
    }

    __device__ __forceinline__ float loss(const Row& row) const {
        float lost = of.largest + logf(of.sum) - row.sure * target_logit;
        if (SMOOTHED) lost -= row.spread * total;
        return (row.counts ? lost : 0.f) * weight;  // the mean of no row is NaN
    }
};
