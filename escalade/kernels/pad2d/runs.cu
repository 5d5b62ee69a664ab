// y[n][c][oh][ow] = x[n][c][oh - top][ow - left], padded according to MODE                                    (NCHW)
//
// A thread stores 16 bytes of y, located by multiplications. It loads their elements one by one, from cache lines that
// its neighbors load as well: rows of x and y are not aligned to each other. Limiter: memory.
//
// Rung: `runs`. Read common/image_packs.cuh (outputs of a thread), beyond.cuh (padding).
#include "common/image_packs.cuh"
#include "common/pool_shape.cuh"
#include "pad2d/beyond.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int MODE = 0;  // problem.mode_number: place in MODES
#endif

struct Padded {
    const Element* const x;
    const int height, width;  // of x
    const int top, left;
    const Element outside;
    const Element* pixels = nullptr;  // row of x
    bool has_row = false;

    __device__ __forceinline__ void seek(u32 plane, int output_row) {
        const int row = source(output_row - top, height);
        has_row = MODE != CONSTANT || row >= 0;
        pixels = x + (1LL * plane * height + row) * width;
    }
    __device__ __forceinline__ Element operator[](int output_column) const {
        const int column = source(output_column - left, width);
        return has_row && (MODE != CONSTANT || column >= 0) ? pixels[column] : outside;
    }
    __device__ __forceinline__ Pack<Element, VECTOR> pack(int column) const { return gathered(*this, column); }
};

extern "C" __global__ void pad2d_runs(const Element* x, Element* y, PoolShape shape, int top, int left, float value,
                                      PackShape packs) {
    gather_pack(Padded{x, shape.height, shape.width, top, left, from_float<Element>(value)}, y, packs);
}
