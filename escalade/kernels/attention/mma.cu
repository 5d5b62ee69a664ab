// y[query] = sum over keys of softmax(scale * q[query] . k[key] + bias[query][key]) * v[key]
//
// A warp takes 16 queries of a head; PAIR_WARPS warps share its keys and values in smem. Keys come in tiles of KEYS by
// cp.async, the next tile while one is multiplied. Per tile:
//   scores = q k^T by mma.sync, in registers, scaled and biased there
//   online softmax: the maximum of a row by two shuffles; exponentials by ex2, with log2(e) folded into the scale
//   sums += weights v: accumulators of the scores are, rounded, the left operand of this product
// Limiter: for windows of 49 tokens memory; for many keys mma.sync and reads of smem, about equal at 64 elements per
// head; ex2 (16 per clock and SM) at 32.
//
// Rows in smem are an odd number of 16-byte chunks apart, so that ldmatrix has no bank conflicts at any head size.
// Rung: `mma`. Read attention.cuh, and the register layouts of mma in common/ptx.cuh.
#include "attention/attention.cuh"
#include "common/mma_tile.cuh"
#include "common/pairs.cuh"

#ifndef ESCALADE_PARAMETERS         // the host defines these; the values here let an editor open the file
constexpr int PAIRS = 1;            // config.pairs: heads of batch items per CTA
constexpr int PAIR_WARPS = 4;       // config.pair_warps: warps per head, with 16 queries each
constexpr int KEYS = 64;            // config.keys: per tile
constexpr bool ONE_TILE = false;    // one_tile: holds all keys
constexpr bool BIAS_PAIRS = false;  // bias_pairs: two adjacent biases are one access
constexpr int BLOCKS_PER_SM = 0;    // blocks_per_sm: the compiler's choice, unless it spills
#endif

constexpr int VECTOR = 16 / sizeof(Element);
constexpr int Q_STEPS = (SIZE * sizeof(Element) + STEP_BYTES - 1) / STEP_BYTES;
constexpr int Q_CHUNKS = SIZE / VECTOR, V_CHUNKS = VALUE_SIZE / VECTOR;  // of 16 bytes
constexpr int KEY_PITCH = (2 * Q_STEPS + 1) * 16, VALUE_PITCH = (V_CHUNKS | 1) * 16;
constexpr int QUERY_PITCH = KEY_PITCH > VALUE_PITCH ? KEY_PITCH : VALUE_PITCH;  // results take the place of queries
constexpr int TILE_BYTES = KEYS * (KEY_PITCH + VALUE_PITCH);
constexpr int PAIR_THREADS = 32 * PAIR_WARPS, ROWS = 16 * PAIR_WARPS;
constexpr int KEY_BLOCKS = KEYS / 8, VALUE_BLOCKS = VALUE_SIZE / 8;
constexpr bool IS_TF32 = sizeof(Element) == 4;
// With a bias, scores stay natural logarithms: a mask of -FLT_MAX would overflow as a binary one.
constexpr float UNIT = HAS_BIAS ? LOG2_E : 1.f;
static_assert(KEYS % 16 == 0, "a k-step of the second product is 16 keys");

__device__ __forceinline__ void round_operand(u32& bits) {
    if (IS_TF32) bits = to_tf32(__uint_as_float(bits));
}

// `rows` rows of a head to smem, by the threads of a pair; past `count` rows, and past the elements of a head, zeros.
template <int CHUNKS, int USED, int PITCH>
__device__ __forceinline__ void copy_rows(u32 shared, const Element* x, int stride, int first, int rows, int count,
                                          int thread) {
    for (int i = thread; i < rows * CHUNKS; i += PAIR_THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool inside = first + row < count && chunk < USED;
        const Element* from = inside ? x + 1LL * (first + row) * stride + chunk * VECTOR : x;
        copy_async_16(shared + row * PITCH + chunk * 16, from, inside);
    }
}

using Scores = float[KEY_BLOCKS][4];
using Sums = float[VALUE_BLOCKS][4];
using Biases = Pack<Element, 2>[KEY_BLOCKS][2];

// Biases of the two rows of a lane, in the order of the scores.
__device__ __forceinline__ void load_biases(Biases& biases, const Element* (&rows)[2], int first, int keys, int stride,
                                            int member) {
#pragma unroll
    for (int j = 0; j < KEY_BLOCKS; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = first + 8 * j + 2 * member;
            if constexpr (BIAS_PAIRS) {
                biases[j][r] = load_pack_if<Element, 2>(key < keys, rows[r] + key);
            } else {
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    biases[j][r].at[e] = load_pack_if<Element, 1>(key + e < keys, rows[r] + 1LL * (key + e) * stride).at[0];
            }
        }
}

__device__ __forceinline__ void multiply_keys(Scores& scores, const u32 (&queries)[Q_STEPS][4], u32 keys, int lane) {
    const u32 row = keys + (lane / 16 * 8 + lane % 8) * KEY_PITCH + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < Q_STEPS; ++step)
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; j += 2) {
            u32 both[4];
            load_matrices(both, row + 8 * j * KEY_PITCH + step * STEP_BYTES);
#pragma unroll
            for (int e = 0; e < 4; ++e) round_operand(both[e]);
            const u32 first[2] = {both[0], both[1]}, second[2] = {both[2], both[3]};
            multiply_add<Element>(scores[j], queries[step], first);
            multiply_add<Element>(scores[j + 1], queries[step], second);
        }
}

// 16-bit elements: 16 keys per step, values transposed on the way from smem.
template <class T>
__device__ __forceinline__ void multiply_values_16(Sums& sums, const Scores& weights, u32 values, int lane) {
    const u32 row = values + lane % 16 * VALUE_PITCH;
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
        const float(&low)[4] = weights[2 * step], (&high)[4] = weights[2 * step + 1];
        const u32 operand[4] = {pack_pair<T>(low[0], low[1]), pack_pair<T>(low[2], low[3]),
                                pack_pair<T>(high[0], high[1]), pack_pair<T>(high[2], high[3])};
#pragma unroll
        for (int n = 0; n + 1 < VALUE_BLOCKS; n += 2) {
            u32 both[4];
            load_matrices_transposed(both, row + 16 * step * VALUE_PITCH + 16 * n + lane / 16 * 16);
            const u32 first[2] = {both[0], both[1]}, second[2] = {both[2], both[3]};
            multiply_add<Element>(sums[n], operand, first);
            multiply_add<Element>(sums[n + 1], operand, second);
        }
        if constexpr (VALUE_BLOCKS % 2 == 1) {
            u32 last[2];
            load_matrices_transposed(last, row + 16 * step * VALUE_PITCH + 16 * (VALUE_BLOCKS - 1));
            multiply_add<Element>(sums[VALUE_BLOCKS - 1], operand, last);
        }
    }
}

// TF32: 8 keys per step, taken in the order 0, 2, 4, 6, 1, 3, 5, 7, in which a lane's weights are its operand.
__device__ __forceinline__ void multiply_values_32(Sums& sums, const Scores& weights, const unsigned char* values,
                                                   int group, int member) {
#pragma unroll
    for (int step = 0; step < KEY_BLOCKS; ++step) {
        const float(&own)[4] = weights[step];
        const u32 operand[4] = {to_tf32(own[0]), to_tf32(own[2]), to_tf32(own[1]), to_tf32(own[3])};
        const unsigned char* row = values + (8 * step + 2 * member) * VALUE_PITCH + 4 * group;
#pragma unroll
        for (int n = 0; n < VALUE_BLOCKS; ++n) {
            const u32 pair[2] = {to_tf32(*reinterpret_cast<const float*>(row + 32 * n)),
                                 to_tf32(*reinterpret_cast<const float*>(row + VALUE_PITCH + 32 * n))};
            multiply_add<Element>(sums[n], operand, pair);
        }
    }
}

// Over the four lanes that share a row.
__device__ __forceinline__ float row_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, 2));
}

__device__ __forceinline__ float row_sum(float value) {
    value += __shfl_xor_sync(0xFFFFFFFF, value, 1);
    return value + __shfl_xor_sync(0xFFFFFFFF, value, 2);
}

// Scores become weights; what was summed before is rescaled to the new maximum. A lane's `total` is of its own keys.
__device__ __forceinline__ void online_softmax(Scores& scores, Sums& sums, float (&largest)[2], float (&total)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float highest = largest[r];
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; ++j) highest = fmaxf(highest, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
        highest = row_max(highest);
        const float start = origin(highest);
        if constexpr (!ONE_TILE) {
            const float correction = exp2_approximate((largest[r] - start) * UNIT);
            total[r] *= correction;
#pragma unroll
            for (int n = 0; n < VALUE_BLOCKS; ++n) sums[n][2 * r] *= correction, sums[n][2 * r + 1] *= correction;
        }
        largest[r] = highest;
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; ++j)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                scores[j][e] = exp2_approximate((scores[j][e] - start) * UNIT);
                total[r] += scores[j][e];
            }
    }
}

extern "C" __global__ void __launch_bounds__(PAIRS* PAIR_THREADS, BLOCKS_PER_SM)
    attention_mma(const Element* q, const Element* k, const Element* v, const Element* bias, Element* y, float scale,
                  AttentionShape shape) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    constexpr int QUERY_BYTES = PAIRS * ROWS * QUERY_PITCH;
    unsigned char* query_rows = shared_part(shared_memory, QUERY_BYTES);
    unsigned char* tile_bytes = shared_part(shared_memory + QUERY_BYTES, REST);
    wait_for_previous_launch();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
    const int query_tiles = (shape.queries + ROWS - 1) / ROWS;
    const int own_pair = warp / PAIR_WARPS, thread = threadIdx.x % PAIR_THREADS;
    const int pair = blockIdx.x / query_tiles * PAIRS + own_pair;
    const bool exists = pair < shape.batch * shape.heads;
    const int batch = exists ? pair / shape.heads : 0, head = exists ? pair % shape.heads : 0;
    const int first_query = blockIdx.x % query_tiles * ROWS;
    const int query = first_query + warp % PAIR_WARPS * 16 + group;  // of a lane's first row; the other is 8 below
    const int queries = exists ? shape.queries : 0;

    const Element* keys = head_of(k, batch, head, shape.k_batch, shape.k_head);
    const Element* values = head_of(v, batch, head, shape.v_batch, shape.v_head);
    const u32 tile = shared_address(tile_bytes) + own_pair * TILE_BYTES;
    const auto copy_tile = [&](int number) {
        const u32 stage = tile + (ONE_TILE ? 0 : number % 2 * PAIRS * TILE_BYTES);
        const int first = number * KEYS, count = exists ? shape.keys : 0;
        copy_rows<2 * Q_STEPS, Q_CHUNKS, KEY_PITCH>(stage, keys, shape.k_token, first, KEYS, count, thread);
        copy_rows<V_CHUNKS, V_CHUNKS, VALUE_PITCH>(stage + KEYS * KEY_PITCH, values, shape.v_token, first, KEYS, count,
                                                   thread);
        copy_async_commit();
    };
    copy_rows<2 * Q_STEPS, Q_CHUNKS, QUERY_PITCH>(shared_address(query_rows) + own_pair * ROWS * QUERY_PITCH,
                                                  head_of(q, batch, head, shape.q_batch, shape.q_head), shape.q_token,
                                                  first_query, ROWS, queries, thread);
    copy_tile(0);

    const Element* bias_rows[2] = {bias, bias};
    int counts[2];  // keys of a lane's rows; without a query, those of the last
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = min(query + 8 * r, shape.queries - 1);
        if (HAS_BIAS) bias_rows[r] = bias_of(bias, shape, batch, head, row);
        counts[r] = keys_of(shape, row);
    }
    u32 operand[Q_STEPS][4];
    Sums sums = {};
    float largest[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.f, 0.f};
    const int most = keys_of(shape, min(first_query + ROWS, shape.queries) - 1);
    const int tiles = ONE_TILE ? 1 : (most + KEYS - 1) / KEYS;
    const bool active = query - group < queries;  // of a warp

    for (int number = 0; number < tiles; ++number) {
        const int first = number * KEYS;
        Biases biases;
        if (HAS_BIAS && active) load_biases(biases, bias_rows, first, shape.keys, shape.bias_key, member);
        copy_async_wait<0>();
        __syncthreads();  // this tile is complete, and no warp reads the one before
        if (number + 1 < tiles) copy_tile(number + 1);
        if (!active) continue;
        if (number == 0) {
            const u32 row = shared_address(query_rows) + (16 * warp + lane % 16) * QUERY_PITCH + lane / 16 * 16;
#pragma unroll
            for (int step = 0; step < Q_STEPS; ++step) {
                load_matrices(operand[step], row + step * STEP_BYTES);
#pragma unroll
                for (int e = 0; e < 4; ++e) round_operand(operand[step][e]);
            }
        }
        const int stage = (ONE_TILE ? 0 : number % 2 * PAIRS * TILE_BYTES) + KEYS * KEY_PITCH;
        Scores scores = {};
        multiply_keys(scores, operand, tile + stage - KEYS * KEY_PITCH, lane);
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                scores[j][e] *= scale;
                if (HAS_BIAS) scores[j][e] += to_float(biases[j][e / 2].at[e % 2]);
            }
        if (first + KEYS > min(counts[0], counts[1]))
#pragma unroll
            for (int j = 0; j < KEY_BLOCKS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (first + 8 * j + 2 * member + e % 2 >= counts[e / 2]) scores[j][e] = minus_infinity();
        online_softmax(scores, sums, largest, total);
        if constexpr (IS_TF32)
            multiply_values_32(sums, scores, tile_bytes + own_pair * TILE_BYTES + stage, group, member);
        else
            multiply_values_16<Element>(sums, scores, tile + stage, lane);
    }
    if (!active) return;

    unsigned char* results = query_rows + 16 * warp * QUERY_PITCH;  // only this warp has read them
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float factor = factor_of(largest[r], row_sum(total[r]));
#pragma unroll
        for (int n = 0; n < VALUE_BLOCKS; ++n) {
            Pack<Element, 2> both;
            from_floats(both, {sums[n][2 * r] * factor, sums[n][2 * r + 1] * factor});
            store_pack(reinterpret_cast<Element*>(results + (group + 8 * r) * QUERY_PITCH) + 8 * n + 2 * member, both);
        }
    }
    __syncwarp();
    Element* rows = y + 1LL * batch * shape.y_batch + 1LL * head * shape.y_head;
    for (int i = lane; i < 16 * V_CHUNKS; i += 32) {
        const int row = i / V_CHUNKS, chunk = i % V_CHUNKS, number = query - group + row;
        if (number >= queries) break;
        store_16(rows + 1LL * number * shape.y_token + chunk * VECTOR,
                 *reinterpret_cast<const uint4*>(results + row * QUERY_PITCH + 16 * chunk));
    }
}
