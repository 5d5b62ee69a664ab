// y[query] = sum over keys of softmax(scale * q[query] . k[key] + bias[query][key]) * v[key]
//
// A CTA takes THREADS / LANES queries of a head, and walks over the keys once, KEYS of them at a time in smem: sums so
// far are rescaled whenever the maximum rises (online softmax), so no score is stored. LANES lanes share a query, each
// with its part of q and of the sums in registers. Limiter: fp32 multiply-adds on CUDA cores, one 16-byte load from
// smem for every four.
#include "attention/attention.cuh"

#ifndef ESCALADE_PARAMETERS       // the host defines these; the values here let an editor open the file
constexpr int THREADS = 128;      // config.threads
constexpr int LANES = 4;          // config.lanes: per query
constexpr int KEYS = 32;          // config.keys: per tile
constexpr int BLOCKS_PER_SM = 0;  // blocks_per_sm: the compiler's choice, unless it spills
#endif

constexpr int TOGETHER = 8;  // keys per rescaling
constexpr int Q_PACKS = (SIZE / 4 + LANES - 1) / LANES, V_PACKS = (VALUE_SIZE / 4 + LANES - 1) / LANES;  // per lane
constexpr int ROWS = THREADS / LANES;
static_assert(KEYS % TOGETHER == 0, "a tile is whole groups of keys");

template <int PACKS>
__device__ __forceinline__ float4 load_four(const Element* row, int pack) {
    if (4 * pack >= PACKS) return make_float4(0.f, 0.f, 0.f, 0.f);
    const Pack<Element, 4> four = *reinterpret_cast<const Pack<Element, 4>*>(row + 4 * pack);
    return make_float4(to_float(four.at[0]), to_float(four.at[1]), to_float(four.at[2]), to_float(four.at[3]));
}

// Rows of keys or values in fp32; rows past the last key are zeros.
template <int WIDTH, int PACKS>
__device__ __forceinline__ void stage(float4 (&tile)[KEYS][PACKS], const Element* rows, int stride, int first,
                                      int count) {
    for (int i = threadIdx.x; i < KEYS * PACKS; i += THREADS) {
        const int row = i / PACKS;
        const bool inside = first + row < count;
        tile[row][i % PACKS] = inside ? load_four<WIDTH>(rows + 1LL * (first + row) * stride, i % PACKS)
                                      : make_float4(0.f, 0.f, 0.f, 0.f);
    }
}

__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    attention_online(const Element* q, const Element* k, const Element* v, const Element* bias, Element* y, float scale,
                     AttentionShape shape) {
    __shared__ float4 key_tile[KEYS][Q_PACKS * LANES];
    __shared__ float4 value_tile[KEYS][V_PACKS * LANES];
    wait_for_previous_launch();
    const int tiles = (shape.queries + ROWS - 1) / ROWS, lane = threadIdx.x % LANES;
    const int pair = blockIdx.x / tiles, batch = pair / shape.heads, head = pair % shape.heads;
    const int first_query = blockIdx.x % tiles * ROWS, query = first_query + threadIdx.x / LANES;
    const int row = query < shape.queries ? query : shape.queries - 1;  // of a thread without a query: any
    const Element* keys = head_of(k, batch, head, shape.k_batch, shape.k_head);
    const Element* values = head_of(v, batch, head, shape.v_batch, shape.v_head);
    const Element* biases = HAS_BIAS ? bias_of(bias, shape, batch, head, row) : bias;
    const Element* own = head_of(q, batch, head, shape.q_batch, shape.q_head) + 1LL * row * shape.q_token;
    float4 query_packs[Q_PACKS], sums[V_PACKS];
#pragma unroll
    for (int i = 0; i < Q_PACKS; ++i) query_packs[i] = load_four<SIZE>(own, i * LANES + lane);
#pragma unroll
    for (int i = 0; i < V_PACKS; ++i) sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    float largest = minus_infinity(), sum = 0.f;

    const int count = keys_of(shape, row), most = keys_of(shape, min(first_query + ROWS, shape.queries) - 1);
    for (int first = 0; first < most; first += KEYS) {
        __syncthreads();
        stage<SIZE>(key_tile, keys, shape.k_token, first, shape.keys);
        stage<VALUE_SIZE>(value_tile, values, shape.v_token, first, shape.keys);
        __syncthreads();
        for (int start = 0; start < KEYS; start += TOGETHER) {
            float scores[TOGETHER];
            float highest = largest;
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int key = first + start + i;
                float score = 0.f;
#pragma unroll
                for (int pack = 0; pack < Q_PACKS; ++pack)
                    score += dot(query_packs[pack], key_tile[start + i][pack * LANES + lane]);
#pragma unroll
                for (int distance = LANES / 2; distance > 0; distance /= 2)
                    score += __shfl_xor_sync(0xFFFFFFFF, score, distance);
                score *= scale;
                if (HAS_BIAS && key < count) score += to_float(biases[1LL * key * shape.bias_key]);
                scores[i] = key < count ? score : minus_infinity();
                highest = fmaxf(highest, scores[i]);
            }
            const float correction = expf(largest - origin(highest));
            largest = highest;
            sum *= correction;
#pragma unroll
            for (int pack = 0; pack < V_PACKS; ++pack)
                sums[pack].x *= correction, sums[pack].y *= correction, sums[pack].z *= correction,
                    sums[pack].w *= correction;
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const float weight = expf(scores[i] - origin(largest));
                sum += weight;
#pragma unroll
                for (int pack = 0; pack < V_PACKS; ++pack) {
                    const float4 value = value_tile[start + i][pack * LANES + lane];
                    sums[pack].x += weight * value.x, sums[pack].y += weight * value.y;
                    sums[pack].z += weight * value.z, sums[pack].w += weight * value.w;
                }
            }
        }
    }
    if (query >= shape.queries) return;
    const float factor = factor_of(largest, sum);
    Element* result = y + 1LL * batch * shape.y_batch + 1LL * head * shape.y_head + 1LL * query * shape.y_token;
#pragma unroll
    for (int i = 0; i < V_PACKS; ++i) {
        const int pack = i * LANES + lane;
        if (4 * pack >= VALUE_SIZE) continue;
        Pack<Element, 4> four;
        from_floats(four, {sums[i].x * factor, sums[i].y * factor, sums[i].z * factor, sums[i].w * factor});
        store_pack(result + 4 * pack, four);
    }
}
