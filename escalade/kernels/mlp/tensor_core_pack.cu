// Weights of all layers in the order in which the lanes of a warp read them from smem (tensor_core.cu)
//
// Fragment [block][step of 16 inputs][step of 16 outputs]: 16 bytes per lane, the operand registers of two MMAs of
// eight outputs each; in fp32, where an MMA has k = 8, two such fragments. The norm before the layer is folded in: W (g
// * n + h) + b = (W g) n + (W h + b), with g and h the norm's weight and bias. Biases are fp32 in accumulator order,
// each twice, for two rows. One thread per 16 bytes of a fragment, or per bias. Each layer has its own range of CTAs in
// one grid: a training step repacks whenever weights change.
//
// Rungs: `tensor_core`, `folded`, `shared_rows`, `clustered_rows`. columns.cuh defines the order of the columns.
#include "common/elements.cuh"
#include "common/pairs.cuh"
#include "mlp/columns.cuh"

struct Stage {
    int first_block;        // of the grid
    int features, outputs;  // columns of a block of the layer
    int all_features, all_outputs, blocks;
    bool blocks_of_outputs, has_norm, has_bias;
    bool from_fp32;               // weight and bias are fp32, from tensor_core_fold.cu
    int fragments_at, biases_at;  // byte offsets in the packed buffer
};
constexpr Stage STAGES[] = {STAGE_LIST};
constexpr bool WIDE = sizeof(Element) == 4;

template <bool FP32>
struct SourceOf {
    using Type = Element;
};
template <>
struct SourceOf<true> {
    using Type = float;
};

template <int NUMBER>
struct Packing {
    static constexpr Stage stage = STAGES[NUMBER];
    static constexpr int steps = steps_of(stage.features), output_steps = steps_of(stage.outputs);
    static constexpr int fragments = stage.blocks * steps * output_steps * (WIDE ? 2 : 1);
    static constexpr int biases = (stage.blocks_of_outputs ? stage.blocks : 1) * output_steps * 32;
    using Source = typename SourceOf<stage.from_fp32>::Type;

    const Source *weight, *bias;
    const Element *norm_weight, *norm_bias;

    // Output of a column of a block, or -1.
    static __device__ __forceinline__ int output_of(int block, int step, int member, int e) {
        const int column = column_of(stage.outputs, step, member, e);
        const int output = (stage.blocks_of_outputs ? block * stage.outputs : 0) + column;
        return column < stage.outputs && output < stage.all_outputs ? output : -1;
    }

    static __device__ __forceinline__ int feature_of(int block, int step, int member, int e) {
        const int column = column_of(stage.features, step, member, e);
        const int feature = (stage.blocks_of_outputs ? 0 : block * stage.features) + column;
        return column < stage.features && feature < stage.all_features ? feature : -1;
    }

    __device__ __forceinline__ float weight_of(int output, int feature) const {
        if (output < 0 || feature < 0) return 0.f;
        const float value = to_float(weight[output * stage.all_features + feature]);
        return stage.has_norm ? value * to_float(norm_weight[feature]) : value;
    }

    // Register `number` of a lane's operand: one fp32 weight, or two adjacent 16-bit ones. A template, so that no pair
    // is instantiated in fp32.
    template <class Stored>
    __device__ __forceinline__ u32 operand_register(int output, int block, int step, int member, int half,
                                                    int number) const {
        if constexpr (sizeof(Stored) == 4) {
            return __float_as_uint(weight_of(output, feature_of(block, step, member, half * 2 + number)));
        } else {
            const int feature = feature_of(block, step, member, number * 2);
            const int next = feature_of(block, step, member, number * 2 + 1);
            return pack_pair<Stored>(weight_of(output, feature), weight_of(output, next));
        }
    }

    __device__ __forceinline__ uint4 fragment_of(int thread) const {
        const int lane = thread % 32, group = lane / 4, member = lane % 4;
        const int half = WIDE ? thread / 32 % 2 : 0;
        const int fragment = thread / (WIDE ? 64 : 32);
        const int output_step = fragment % output_steps, step = fragment / output_steps % steps;
        const int block = fragment / output_steps / steps;
        u32 registers[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // tile of eight outputs i / 2, register i % 2 of its operand
            const int output = output_of(block, output_step, group / 2, i / 2 * 2 + group % 2);
            registers[i] = operand_register<Element>(output, block, step, member, half, i % 2);
        }
        return make_uint4(registers[0], registers[1], registers[2], registers[3]);
    }

    __device__ __forceinline__ float bias_of(int bias_index) const {
        const int tile = bias_index / 16, member = bias_index / 4 % 4;
        const int step = tile / 2 % output_steps;
        const int output = output_of(tile / 2 / output_steps, step, member, tile % 2 * 2 + bias_index % 2);
        float sum = 0.f;
        if (output >= 0) {
            if (stage.has_bias) sum = to_float(bias[output]);
            if (stage.has_norm)
                for (int feature = 0; feature < stage.all_features; ++feature)
                    sum += to_float(weight[output * stage.all_features + feature]) * to_float(norm_bias[feature]);
        }
        return sum;
    }
};

template <int NUMBER>
__device__ __forceinline__ void pack(const void* weight, const void* bias, const Element* norm_weight,
                                     const Element* norm_bias, unsigned char* packed) {
    using Own = Packing<NUMBER>;
    using Source = typename Own::Source;
    const int thread = (static_cast<int>(blockIdx.x) - Own::stage.first_block) * static_cast<int>(blockDim.x) +
                       static_cast<int>(threadIdx.x);
    const int bias_index = thread - Own::fragments * 32;
    if (thread < 0 || bias_index >= Own::biases) return;
    const Own own{static_cast<const Source*>(weight), static_cast<const Source*>(bias), norm_weight, norm_bias};
    if (bias_index < 0) reinterpret_cast<uint4*>(packed + Own::stage.fragments_at)[thread] = own.fragment_of(thread);
    else reinterpret_cast<float*>(packed + Own::stage.biases_at)[bias_index] = own.bias_of(bias_index);
}

extern "C" __global__ void mlp_tensor_core_pack(PARAMETER_LIST, unsigned char* packed) {
    wait_for_previous_launch();
    PACK_LIST
}
