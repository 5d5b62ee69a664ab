// Split-K reduction of one output tile across the SPLITS CTAs of a cluster, through DSMEM.
//
// A warpgroup's accumulators are PIECES, each of four accumulators per thread. Each warp's share of a piece has one
// owner CTA. Every CTA with a partial sum pushes it from registers into the owner's smem; an mbarrier counts the bytes.
// The owner adds the PARTS in a fixed order once all have arrived, so the result is deterministic. There is no
// cluster-wide barrier: a CTA waits only for data it needs, and exits when it has received everything it owns, because
// then nothing is in flight to it.
// CTA p % SPLITS owns piece p of warp 0; for the other warps the owner is shifted, or all warps would push to one CTA
// at once. SHARERS warpgroups of the owner each take every SHARERS-th piece, with one barrier each.
#pragma once

#include "common/hopper.cuh"
#include "common/s8.cuh"

// Accumulators travel as bits of floats; integers are added as such, so their sum stays exact.
__device__ __forceinline__ float as_bits(float sum) { return sum; }
__device__ __forceinline__ float as_bits(int sum) { return __int_as_float(sum); }
template <class Sum>
__device__ __forceinline__ Sum of_bits(float bits);
template <>
__device__ __forceinline__ float of_bits<float>(float bits) { return bits; }
template <>
__device__ __forceinline__ int of_bits<int>(float bits) { return __float_as_int(bits); }

template <int PIECES, int PARTS, int SHARERS, class Sum = float>
struct SharedSum {
    static constexpr int PIECE_BYTES = 128 * 16, WARPS = 4;
    static constexpr int MOST = (PIECES + SPLITS - 1) / SPLITS;  // pieces per owner
    static constexpr int BYTES = MOST * PARTS * PIECE_BYTES;
    static constexpr int MOST_OF_ONE = (MOST + SHARERS - 1) / SHARERS;
    static constexpr int LOADS = PARTS >= 16 ? 1 : 16 / PARTS;  // loads in flight: 16 hide the smem latency
    static constexpr int AT_ONCE = LOADS < MOST_OF_ONE ? LOADS : MOST_OF_ONE;

    const u32 received;  // partial sums of the pieces this CTA owns
    const u32 barriers;  // one per sharer
    const u32 rank;      // of this CTA in the cluster

    __device__ __forceinline__ static int own_warp() { return threadIdx.x / 32 % WARPS; }
    // Owner shift of a warp, in CTAs.
    __device__ __forceinline__ static int shift(int warp) { return warp * SPLITS / WARPS; }
    // First piece of a warp that this CTA owns.
    __device__ __forceinline__ int first(int warp) const { return (rank + SPLITS - shift(warp)) % SPLITS; }

    // Number of pieces a warp of a sharer finishes, and the index of its `number`-th.
    __device__ __forceinline__ int count(int sharer, int warp) const {
        const int owned = (PIECES + SPLITS - 1 - first(warp)) / SPLITS;
        return (owned + SHARERS - 1 - sharer) / SHARERS;
    }
    __device__ __forceinline__ int count(int sharer) const { return count(sharer, own_warp()); }
    __device__ __forceinline__ int piece(int sharer, int number) const {
        return first(own_warp()) + SPLITS * (sharer + SHARERS * number);
    }
    // Over all warps.
    __device__ __forceinline__ int count_of_all(int sharer) const {
        int sum = 0;
        for (int warp = 0; warp < WARPS; ++warp) sum += count(sharer, warp);
        return sum;
    }

    // Called by one thread, before the cluster barrier.
    __device__ __forceinline__ void init() const {
        if constexpr (SPLITS > 1)
            for (int sharer = 0; sharer < SHARERS; ++sharer) {
                barrier_init(barriers + 8 * sharer, 1);
                const int pieces = count_of_all(sharer);
                if (pieces) barrier_expect(barriers + 8 * sharer, pieces * PARTS * (PIECE_BYTES / WARPS));
            }
    }

    // Call after the cluster barrier. Without a cluster, a barrier of the warpgroups must follow.
    __device__ __forceinline__ void push(const Sum* sums, int part) const {
        const u32 own = received + (part * 128 + threadIdx.x % 128) * 16;
        const int turn = shift(own_warp());
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int slot = piece / SPLITS, owner = piece % SPLITS + turn;
            const u32 to = own + slot * PARTS * PIECE_BYTES;
            const Sum* four = sums + 4 * piece;
            const float4 value =
                make_float4(as_bits(four[0]), as_bits(four[1]), as_bits(four[2]), as_bits(four[3]));
            if constexpr (SPLITS > 1)
                push_cluster(to, barriers + slot % SHARERS * 8, owner < SPLITS ? owner : owner - SPLITS, value);
            else store_shared(to, value);
        }
    }

    // Waits until all parts of a sharer's pieces have arrived.
    __device__ __forceinline__ void wait(int sharer) const {
        if constexpr (SPLITS > 1) barrier_wait(barriers + 8 * sharer, 0);
    }

    // Totals of up to AT_ONCE of a sharer's pieces, starting at number `start`.
    __device__ __forceinline__ void add_up(Sum (&sums)[AT_ONCE][4], int sharer, int start) const {
        const u32 own = received + threadIdx.x % 128 * 16;
        float4 parts[AT_ONCE][PARTS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (start + i < count(sharer))
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const int slot = sharer + SHARERS * (start + i);
                    parts[i][part] = load_shared_16(own + (slot * PARTS + part) * PIECE_BYTES);
                }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            float4 four = parts[i][0];
            sums[i][0] = of_bits<Sum>(four.x), sums[i][1] = of_bits<Sum>(four.y);
            sums[i][2] = of_bits<Sum>(four.z), sums[i][3] = of_bits<Sum>(four.w);
#pragma unroll
            for (int part = 1; part < PARTS; ++part) {
                four = parts[i][part];
                sums[i][0] += of_bits<Sum>(four.x), sums[i][1] += of_bits<Sum>(four.y);
                sums[i][2] += of_bits<Sum>(four.z), sums[i][3] += of_bits<Sum>(four.w);
            }
        }
    }
};
