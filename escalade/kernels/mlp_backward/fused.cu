// parts[block] = gradients of all parameters over the rows of the CTA; grad_x[row], if requested
//
// A CTA takes TILE_ROWS rows at a time through the chain forward and backward. All weights W are in smem, and so are
// the rows' inputs N and gradients G of every layer; a layer's groups are rows of their own. Three GEMMs:
//
//   forwards   Z = N W^T + bias   4x4 outputs per thread, split-K so that most threads have work; the parts are reduced
//   backwards  N' = G W           in scratch, where all threads share the activations and slopes
//   weights    H += G^T N         after the walk, for all layers at once: a warp has 32x64 of one layer, a thread 8x8
//                                 in registers for the life of the CTA (RESIDENT; else they are kept in parts)
//
// A norm's weight v and bias u are folded into W and the bias, so N is the normalized row, and their gradients follow
// from existing sums: with H = G^T N and s = the sum of G over rows, the gradient of W is H v + s u^T, of v the column
// sums of W * H, and of u those of W * s. Limiter: FFMA, and the smem reads between them.
//
// Rung: `fused`. Read fused_layers.cuh (layer constants), fused_loading.cuh, fused_walk.cuh (forward and backward),
// fused_products.cuh, fused_sums.cuh, then finish.cuh.
#include "mlp_backward/fused_loading.cuh"
#include "mlp_backward/fused_sums.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool INPUT_GRADIENT = false;  // problem.input_gradient
constexpr int BLOCKS_PER_SM = 2;        // blocks_per_sm
constexpr int WARP_TILES = 5;           // plan.warp_tiles: shares of the weights, one per warp
constexpr int SHARED_FLOATS = 1324;     // plan.shared_floats
constexpr int PART_PITCH = 316;         // part_pitch: floats per partial sum
#endif

#include "mlp_backward/fused_walk.cuh"
#include "mlp_backward/finish.cuh"

constexpr int PASSES = (WARP_TILES + WARPS - 1) / WARPS;
constexpr bool RESIDENT = PASSES == 1;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    mlp_backward_fused(const Element* x, const Element* grad_y, float* parts, float* grad_x, int tiles, int last_rows,
                       PARAMETER_LIST) {
    extern __shared__ __align__(16) float shared[];
    const Element* const parameters[] = {PARAMETER_NAMES};
    float* const slot = parts + 1LL * blockIdx.x * PART_PITCH;
    const int warp = threadIdx.x / 32;

    for (int at = threadIdx.x * 4; at < SHARED_FLOATS; at += THREADS * 4) store_pack(shared + at, Four{});
    wait_for_previous_launch();
    __syncthreads();
    load_weights<0>(shared, parameters);

    float sums[8][8] = {};
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int present = tile < tiles - 1 ? TILE_ROWS : last_rows;
        const long long first = 1LL * tile * TILE_ROWS;
        constexpr Layer begin = LAYERS[0], end = LAYERS[LAST];
        constexpr int width_in = Of<0>::width_in, width_out = Of<LAST>::width_out;
        load_rows<width_in, begin.features % 4 == 0 ? 4 : 1>(shared, x + first * width_in, present, Of<0>::input_at);
        const Element* gradient = grad_y + first * width_out;
        if constexpr (end.activation == 0)
            load_rows<width_out, end.outputs % 4 == 0 ? 4 : 1>(shared, gradient, present, Of<LAST>::gradient_at);
        __syncthreads();
        forwards<0>(shared, gradient, present);
        backwards<LAST>(shared, grad_x + first * width_in, present);

        if constexpr (RESIDENT) {
            add_weight_gradient(sums, shared, warp, present);
        } else {
            for (int pass = 0; pass < PASSES; ++pass) {
                const int share = pass * WARPS + warp;
                for (auto& row : sums)
                    for (float& sum : row) sum = 0.f;
                if (tile != blockIdx.x) move_any_sums<0, false>(sums, slot, share);
                add_weight_gradient(sums, shared, share, present);
                move_any_sums<0, true>(sums, slot, share);
            }
        }
        add_bias_gradient<0, 0>(shared, present);
        __syncthreads();
    }

    if constexpr (RESIDENT) move_any_sums<0, true>(sums, slot, warp);
    __syncthreads();
    finish_norms<0>(shared, slot, parameters);
    __syncthreads();
    finish_vectors<0>(shared, slot);
}
