// The weights of one layer in the order in which the lanes of a warp take them from shared memory (tensor_core.cu)
//
// Fragment [block][step of 16 inputs][step of 16 outputs]: 16 bytes a lane, the operand registers of two products of
// eight outputs each; in fp32, where a product takes eight inputs, two such fragments. The norm in front of the layer
// is folded in: W (g * n + h) + b = (W g) n + (W h + b), with g and h the norm's own weight and bias. Biases are fp32,
// as the sums lie in the registers of four lanes: each twice, for two rows. A thread makes 16 bytes of a fragment, or
// one bias.
//
// Serves `tensor_core`, `folded`, `shared_rows` and `clustered_rows` alike. columns.cuh has the order of the columns.
#include "common/elements.cuh"
#include "common/pairs.cuh"
#include "mlp/columns.cuh"

constexpr int STEPS = steps_of(FEATURES), OUTPUT_STEPS = steps_of(OUTPUTS);
constexpr bool WIDE = sizeof(Element) == 4;
constexpr int FRAGMENTS = BLOCKS * STEPS * OUTPUT_STEPS * (WIDE ? 2 : 1);
constexpr int BIASES = (BLOCKS_OF_OUTPUTS ? BLOCKS : 1) * OUTPUT_STEPS * 32;

struct Layer {
    const Source *weight, *bias;
    const Element *norm_weight, *norm_bias;

    __device__ __forceinline__ float at(int output, int feature) const {
        const float value = to_float(weight[output * ALL_FEATURES + feature]);
        return HAS_NORM ? value * to_float(norm_weight[feature]) : value;
    }
};

// Which output a column of a block is, or -1.
__device__ __forceinline__ int output_of(int block, int step, int member, int e) {
    const int column = column_of(OUTPUTS, step, member, e);
    const int output = (BLOCKS_OF_OUTPUTS ? block * OUTPUTS : 0) + column;
    return column < OUTPUTS && output < ALL_OUTPUTS ? output : -1;
}

__device__ __forceinline__ int feature_of(int block, int step, int member, int e) {
    const int column = column_of(FEATURES, step, member, e);
    const int feature = (BLOCKS_OF_OUTPUTS ? 0 : block * FEATURES) + column;
    return column < FEATURES && feature < ALL_FEATURES ? feature : -1;
}

__device__ __forceinline__ float weight_of(const Layer& layer, int output, int feature) {
    return output < 0 || feature < 0 ? 0.f : layer.at(output, feature);
}

// Register `number` of a lane's operand: one weight in fp32, two neighbours in 16 bits.
template <class Element>
__device__ __forceinline__ u32 operand_register(const Layer& layer, int output, int block, int step, int member,
                                                int half, int number) {
    if constexpr (sizeof(Element) == 4) {
        return __float_as_uint(weight_of(layer, output, feature_of(block, step, member, half * 2 + number)));
    } else {
        const int feature = feature_of(block, step, member, number * 2);
        const int next = feature_of(block, step, member, number * 2 + 1);
        return pack_pair<Element>(weight_of(layer, output, feature), weight_of(layer, output, next));
    }
}

extern "C" __global__ void mlp_tensor_core_pack(const Source* weight, const Source* bias, const Element* norm_weight,
                                    const Element* norm_bias, uint4* fragments, float* biases) {
    wait_for_previous_launch();
    const Layer layer{weight, bias, norm_weight, norm_bias};
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread < FRAGMENTS * 32) {
        const int lane = thread % 32, group = lane / 4, member = lane % 4;
        const int half = WIDE ? thread / 32 % 2 : 0;
        const int fragment = thread / (WIDE ? 64 : 32);
        const int output_step = fragment % OUTPUT_STEPS, step = fragment / OUTPUT_STEPS % STEPS;
        const int block = fragment / OUTPUT_STEPS / STEPS;
        u32 registers[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // tile of eight outputs i / 2, register i % 2 of its operand
            const int output = output_of(block, output_step, group / 2, i / 2 * 2 + group % 2);
            registers[i] = operand_register<Element>(layer, output, block, step, member, half, i % 2);
        }
        fragments[thread] = make_uint4(registers[0], registers[1], registers[2], registers[3]);
    } else if (thread < FRAGMENTS * 32 + BIASES) {
        const int place = thread - FRAGMENTS * 32;
        const int tile = place / 16, member = place / 4 % 4;
        const int output = output_of(tile / 2 / OUTPUT_STEPS, tile / 2 % OUTPUT_STEPS, member,
                                     tile % 2 * 2 + place % 2);
        float sum = 0.f;
        if (output >= 0) {
            if (HAS_BIAS) sum = to_float(bias[output]);
            if (HAS_NORM)
                for (int feature = 0; feature < ALL_FEATURES; ++feature)
                    sum += to_float(weight[output * ALL_FEATURES + feature]) * to_float(norm_bias[feature]);
        }
        biases[place] = sum;
    }
}
