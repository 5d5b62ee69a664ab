// Merges two layers with nothing between them: B (A x + a) + b = (B A) x + (B a + b), in fp32
//
// Either may be shared by several groups of its columns; the result is one layer of the whole row. One thread per
// weight or bias; once per network. Limiter: the launch.
//
// Rungs: `folded`, `shared_rows`, `clustered_rows`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                  // problem.dtype
constexpr int FIRST_GROUPS = 1;         // one.groups
constexpr int FIRST_FEATURES = 32;      // one.features
constexpr int FIRST_OUTPUTS = 320;      // one.outputs
constexpr bool FIRST_HAS_BIAS = false;  // one.bias
constexpr int SECOND_GROUPS = 5;        // other.groups
constexpr int SECOND_FEATURES = 64;     // other.features
constexpr int SECOND_OUTPUTS = 64;      // other.outputs
constexpr bool SECOND_HAS_BIAS = true;  // other.bias
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

constexpr int WIDTH_IN = FIRST_GROUPS * FIRST_FEATURES, WIDTH_OUT = SECOND_GROUPS * SECOND_OUTPUTS;

extern "C" __global__ void mlp_tensor_core_fold(const Element* first, const Element* first_bias, const Element* second,
                                    const Element* second_bias, float* weight, float* bias) {
    wait_for_previous_launch();
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= WIDTH_OUT * (WIDTH_IN + 1)) return;
    const int output = thread / (WIDTH_IN + 1), column = thread % (WIDTH_IN + 1);
    const Element* row = second + output % SECOND_OUTPUTS * SECOND_FEATURES;
    const int begin = output / SECOND_OUTPUTS * SECOND_FEATURES;  // of the hidden columns that this output reads
    float sum = 0.f;
    for (int i = 0; i < SECOND_FEATURES; ++i) {
        const int hidden = begin + i;
        if (column == WIDTH_IN) {
            if (FIRST_HAS_BIAS) sum += to_float(row[i]) * to_float(first_bias[hidden % FIRST_OUTPUTS]);
        } else if (column / FIRST_FEATURES == hidden / FIRST_OUTPUTS) {
            sum += to_float(row[i]) *
                   to_float(first[hidden % FIRST_OUTPUTS * FIRST_FEATURES + column % FIRST_FEATURES]);
        }
    }
    if (column < WIDTH_IN)
        weight[output * WIDTH_IN + column] = sum;
    else
        bias[output] = SECOND_HAS_BIAS ? sum + to_float(second_bias[output % SECOND_OUTPUTS]) : sum;
}
