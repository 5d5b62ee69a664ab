// Chain of layers from the prelude: LAYER_LIST, and the tensors of all layers in order as PARAMETER_LIST.
#pragma once

#include "common/elements.cuh"

struct Layer {
    int features, outputs, groups;
    bool norm, bias;
    int activation;
    float epsilon;
    int parameter;  // index of its first tensor
    int vector;     // weights per load
};
constexpr Layer LAYERS[] = {LAYER_LIST};
constexpr int COUNT = sizeof(LAYERS) / sizeof(Layer), LAST = COUNT - 1;

template <int L>
struct Of {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int width_in = layer.groups * layer.features, width_out = layer.groups * layer.outputs;
    static constexpr int norm_weight = layer.parameter, norm_bias = layer.parameter + 1;
    static constexpr int weight = layer.parameter + (layer.norm ? 2 : 0), bias = weight + 1;
};
constexpr int FEATURES = Of<0>::width_in, OUTPUTS = Of<LAST>::width_out;
