// Rows whose elements are `inner` apart, such as an image's channels in NCHW: adjacent rows are contiguous.
//
// A tile is ACROSS packs of VECTOR rows, one pack per thread of a part. The PARTS parts of a CTA split the elements:
// part i % PARTS has element i, STEPS each. Their results are reduced in smem.
//
// CTAs are persistent. While a tile is reduced and stored, cp.async copies the CTA's next one to smem, so that loads are
// always in flight. A thread reads back only what it has copied itself: no barrier is needed. Without STAGED (packs too
// narrow for cp.async, or tiles too large for smem) a tile is loaded to registers when its turn comes.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // problem.dtype
constexpr int VECTOR = 4;         // config.vector: adjacent rows per thread
constexpr int PARTS = 8;          // config.parts: groups of warps that share the elements of a row
constexpr int ACROSS = 32;        // config.across: packs per tile
constexpr int STEPS = 8;          // steps: elements of a row per thread
constexpr bool STAGED = true;     // staged
constexpr int BLOCKS_PER_SM = 4;  // blocks_per_sm
#endif

constexpr int COLUMN_THREADS = PARTS * ACROSS;
using Rows = Pack<Element, VECTOR>;

struct Column {
    long long at;  // start of its rows; a pack that does not exist repeats the first
    bool there;
    int part;

    __device__ __forceinline__ static Column of_thread(u32 tile, int rows, int length, int inner) {
        const u32 packs = inner / VECTOR;
        const u32 asked = tile * ACROSS + threadIdx.x % ACROSS;
        Column column;
        column.there = asked < static_cast<u32>(rows) / VECTOR;
        const u32 pack = column.there ? asked : 0;
        column.part = threadIdx.x / ACROSS;
        column.at = 1LL * (pack / packs) * length * inner + pack % packs * VECTOR;
        return column;
    }

    // Of step i: only the last can be out of range.
    __device__ __forceinline__ int element(int i) const { return i * PARTS + part; }
    __device__ __forceinline__ bool has(int i, int length) const { return i + 1 < STEPS || element(i) < length; }
};

__device__ __forceinline__ u32 tiles_of(int rows) { return (rows / VECTOR + ACROSS - 1) / ACROSS; }

// The elements of this thread in a tile, with STAGED on their way through smem.
struct StagedColumn {
    Rows* const slots;

    __device__ __forceinline__ explicit StagedColumn(Rows* shared) : slots(shared + threadIdx.x) {}

    // Begins to copy a tile.
    __device__ __forceinline__ void copy(const Element* x, const Column& column, int length, int inner) const {
        if constexpr (STAGED) {
            each(x, column, length, inner, [&](int i, const Element* from) {
                const u32 to = shared_address(slots + i * COLUMN_THREADS);
                if constexpr (sizeof(Rows) == 16) copy_async_16(to, from, true);
                if constexpr (sizeof(Rows) == 8) copy_async_8(to, from, true);
                if constexpr (sizeof(Rows) == 4) copy_async_4(to, from, true);
            });
            copy_async_commit();
        }
    }

    // The tile of the last `copy`.
    __device__ __forceinline__ void read(Rows (&loaded)[STEPS], const Element* x, const Column& column, int length,
                                         int inner) const {
        if constexpr (STAGED) {
            copy_async_wait<0>();
#pragma unroll
            for (int i = 0; i < STEPS; ++i) loaded[i] = slots[i * COLUMN_THREADS];
        } else {
            each(x, column, length, inner,
                 [&](int i, const Element* from) { loaded[i] = load_pack<Element, VECTOR>(from); });
        }
    }

  private:
    // Calls `use` for the address of each step. An element that does not exist repeats the first.
    template <class Use>
    __device__ __forceinline__ static void each(const Element* x, const Column& column, int length, int inner, Use use) {
        const Element* from = x + column.at + 1LL * column.part * inner;
#pragma unroll
        for (int i = 0; i < STEPS; ++i, from += 1LL * PARTS * inner)
            use(i, column.has(i, length) ? from : x + column.at);
    }
};

using PartialRows = Pack<float, VECTOR>;

// One array for all reductions: in a template each instance would have its own.
__device__ __forceinline__ PartialRows (&exchange())[PARTS][ACROSS] {
    __shared__ PartialRows met[PARTS][ACROSS];
    return met;
}

// Reduces each row of a pack over the parts; every part receives the result.
template <class Reduce>
__device__ __forceinline__ void over_parts(float (&values)[VECTOR], Reduce reduce) {
    if constexpr (PARTS > 1) {
        PartialRows(&met)[PARTS][ACROSS] = exchange();
        const int pack = threadIdx.x % ACROSS;
        __syncthreads();  // the previous round has been read
        PartialRows& mine = met[threadIdx.x / ACROSS][pack];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) mine.at[e] = values[e];
        __syncthreads();
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) values[e] = met[0][pack].at[e];
#pragma unroll 1  // out of registers otherwise
        for (int part = 1; part < PARTS; ++part) {
            const PartialRows other = met[part][pack];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) values[e] = reduce(values[e], other.at[e]);
        }
    }
}

__device__ __forceinline__ void sum_over_parts(float (&values)[VECTOR]) {
    over_parts(values, [](float one, float other) { return one + other; });
}
