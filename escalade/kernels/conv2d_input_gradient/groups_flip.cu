// flipped[g*C + c][r'][s'][k] = w[g*K + k][first_r + (taps_h - 1 - r')*step_h][first_s + (taps_w - 1 - s')*step_w][c]
// for the K filters and C channels of each group g                                                            (NHWC)
// flipped[g*C + c][k][r'][s'] = w[g*K + k][c][...][...]                                                        (NCHW)
//
// The filters whose convolution with dy is the gradient of x, for grouped convolutions; for a strided one only the taps
// of one sub-pixel phase. One thread per element: they are few. Limiter: the launch.
//
// Rungs: `depthwise`, `depthwise_tile`, `depthwise_mma` and `grouped`.
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // forward.dtype
constexpr bool NHWC = false;  // forward.layout == "nhwc"
#endif

struct SubFilter {  // filled by escalade/ops/conv2d_input_gradient/rungs/phases.py, in this order
    int filters, channels, filter_height, filter_width;
    int first_r, first_s, step_h, step_w, taps_h, taps_w;
};

extern "C" __global__ void conv2d_input_gradient_groups_flip(const Element* weight, Element* flipped, SubFilter sub,
                                                             int groups) {
    wait_for_previous_launch();
    const int taps = sub.filter_height * sub.filter_width, sub_taps = sub.taps_h * sub.taps_w;
    const int K = sub.filters / groups, C = sub.channels / groups;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * sub.channels * K * sub_taps) return;
    const int of_channel = static_cast<int>(at % (K * sub_taps)), channel = static_cast<int>(at / (K * sub_taps));
    const int k = NHWC ? of_channel % K : of_channel / sub_taps, sub_tap = NHWC ? of_channel / K : of_channel % sub_taps;
    const int r = sub.first_r + (sub.taps_h - 1 - sub_tap / sub.taps_w) * sub.step_h;
    const int s = sub.first_s + (sub.taps_w - 1 - sub_tap % sub.taps_w) * sub.step_w;
    const int tap = r * sub.filter_width + s, c = channel % C;
    const long long filter = 1LL * (channel / C) * K + k;
    flipped[at] = weight[NHWC ? (filter * taps + tap) * C + c : (filter * C + c) * taps + tap];
}
