// Sums over all threads of a cluster that share a column, for COLUMNS adjacent columns, in a fixed order.
#pragma once

#include "common/hopper.cuh"
#include "common/warp.cuh"

// Smem for COUNT sums per column. Use each object once: other CTAs may read it until the next cluster barrier.
template <int COUNT, int COLUMNS, int THREADS>
struct ClusterSums {
    static_assert(COLUMNS <= 32 && 32 % COLUMNS == 0 && COLUMNS * COUNT % 4 == 0 && THREADS % 32 == 0);
    alignas(16) float of_block[COLUMNS * COUNT];
    alignas(16) float of_cluster[COLUMNS * COUNT];
    float of_warps[THREADS / 32][COLUMNS * COUNT];

    // Each thread of the cluster passes its values of column threadIdx.x % COLUMNS and receives the column's sums.
    __device__ __forceinline__ void over(float (&values)[COUNT]) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % COLUMNS;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
#pragma unroll
            for (int distance = 16; distance >= COLUMNS; distance /= 2)
                values[i] += __shfl_xor_sync(ALL_LANES, values[i], distance);
            if (lane < COLUMNS) of_warps[warp][column * COUNT + i] = values[i];
        }
        __syncthreads();
        for (int at = threadIdx.x; at < COLUMNS * COUNT; at += THREADS) {
            float sum = 0.f;
#pragma unroll
            for (int one = 0; one < THREADS / 32; ++one) sum += of_warps[one][at];
            of_block[at] = sum;
        }
        cluster_sync();
        for (int quad = threadIdx.x; quad < COLUMNS * COUNT / 4; quad += THREADS) {
            float4 sum = {0.f, 0.f, 0.f, 0.f};
            for (u32 rank = 0; rank < cluster_size(); ++rank) {
                const float4 more = load_cluster(shared_address(of_block + 4 * quad), rank);
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            of_cluster[4 * quad] = sum.x, of_cluster[4 * quad + 1] = sum.y;
            of_cluster[4 * quad + 2] = sum.z, of_cluster[4 * quad + 3] = sum.w;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = of_cluster[column * COUNT + i];
    }
};
