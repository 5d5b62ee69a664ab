// y[query] = sum over keys of softmax(scale * q[query] . k[key] + bias[query][key]) * v[key]
//
// The foot of the ladder: one thread per output, in three passes over the keys: maximum, sum, values. Limiter: every
// thread computes all scores of its query, in each pass.
#include "attention/attention.cuh"

extern "C" __global__ void attention_naive(const Element* q, const Element* k, const Element* v, const Element* bias,
                                           Element* y, float scale, AttentionShape shape) {
    wait_for_previous_launch();
    const long long output = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    const int feature = output % VALUE_SIZE;
    const long long row = output / VALUE_SIZE;
    const int query = row % shape.queries;
    const int head = row / shape.queries % shape.heads;
    const int batch = row / shape.queries / shape.heads;
    if (batch >= shape.batch) return;
    const Element* queries = head_of(q, batch, head, shape.q_batch, shape.q_head) + 1LL * query * shape.q_token;
    const Element* keys = head_of(k, batch, head, shape.k_batch, shape.k_head);
    const Element* values = head_of(v, batch, head, shape.v_batch, shape.v_head) + feature;
    const Element* biases = HAS_BIAS ? bias_of(bias, shape, batch, head, query) : bias;
    const int count = keys_of(shape, query);
    const auto score = [&](int key) {
        float sum = 0.f;
        for (int i = 0; i < SIZE; ++i) sum += to_float(queries[i]) * to_float(keys[1LL * key * shape.k_token + i]);
        return sum * scale + (HAS_BIAS ? to_float(biases[1LL * key * shape.bias_key]) : 0.f);
    };
    float largest = minus_infinity();
    for (int key = 0; key < count; ++key) largest = fmaxf(largest, score(key));
    float sum = 0.f;
    for (int key = 0; key < count; ++key) sum += expf(score(key) - origin(largest));
    float result = 0.f;
    for (int key = 0; key < count; ++key)
        result += expf(score(key) - origin(largest)) * to_float(values[1LL * key * shape.v_token]);
    y[1LL * batch * shape.y_batch + 1LL * head * shape.y_head + 1LL * query * shape.y_token + feature] =
        from_float<Element>(result * factor_of(largest, sum));
}
