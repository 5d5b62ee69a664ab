// y[n][c][oh][ow] = x[n][c][row of oh][column of ow], the nearest pixel                                       (NCHW)
//
// A thread stores 16 bytes of y, located by multiplications. If every pixel occurs REPEATS times in a row, those of a
// pack are one load; otherwise they are single loads, from cache lines that neighbors load as well. Limiter: memory.
//
// Rung: `packs`. Read common/image_packs.cuh (outputs of a thread). places.cuh has PyTorch's rules for source pixels.
#include "common/image_packs.cuh"
#include "upsample2d/places.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int REPEATS = 2;  // repeats: times that each pixel of x occurs in a row, a divisor of VECTOR; 0: any pixels
#endif

struct Nearest {
    const Element* const x;
    const int height, width;  // of x
    const float row_step, column_step;
    const Element* pixels = nullptr;  // row of x

    __device__ __forceinline__ void seek(u32 plane, int row) {
        pixels = x + (1LL * plane * height + taps_of(row, height, row_step).first) * width;
    }
    __device__ __forceinline__ Element operator[](int column) const {
        return pixels[taps_of(column, width, column_step).first];
    }
    __device__ __forceinline__ Pack<Element, VECTOR> pack(int column) const {
        if (REPEATS == 0) return gathered(*this, column);
        constexpr int TIMES = REPEATS ? REPEATS : 1;  // a division by 0 does not compile
        const Pack<Element, VECTOR / TIMES> few = load_pack<Element, VECTOR / TIMES>(pixels + column / TIMES);
        Pack<Element, VECTOR> values;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) values.at[e] = few.at[e / TIMES];
        return values;
    }
};

extern "C" __global__ void upsample2d_packs(const Element* x, Element* y, PoolShape shape, float row_step,
                                            float column_step, PackShape packs) {
    gather_pack(Nearest{x, shape.height, shape.width, row_step, column_step}, y, packs);
}
