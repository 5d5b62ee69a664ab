// large[n][c][h*FACTOR + i][w*FACTOR + j] = small[n][(c*FACTOR + i)*FACTOR + j][h][w]; with DOWN the inverse   (NCHW)
//
// A thread takes 16 bytes of the large image in one access, located by multiplications. In the small image they are in
// FACTOR planes; those that are adjacent there are one access as well. Limiter: memory.
//
// Rung: `runs`. Read common/image_packs.cuh (elements of a thread), shuffle.cuh (sizes).
#include "common/image_packs.cuh"
#include "pixel_shuffle/shuffle.cuh"

constexpr int TOGETHER = VECTOR % FACTOR == 0 ? VECTOR / FACTOR : 1;  // adjacent elements of a plane in a whole pack

// A row of the large image: its elements in the small one.
template <class T>
struct Row {
    T* const small;
    const int height, width;  // of the small image
    T* pixels = nullptr;

    __device__ __forceinline__ void seek(u32 plane, int row) {
        pixels = small + ((1LL * plane * BLOCK + row % FACTOR * FACTOR) * height + row / FACTOR) * width;
    }
    __device__ __forceinline__ T& operator[](int column) const {
        return pixels[1LL * (column % FACTOR) * height * width + column / FACTOR];
    }
    __device__ __forceinline__ Pack<Element, VECTOR> pack(int column) const {
        Pack<Element, VECTOR> values;
#pragma unroll
        for (int e = 0; e < VECTOR / TOGETHER; ++e) {
            const Pack<Element, TOGETHER> part = load_pack<Element, TOGETHER>(&(*this)[column + e]);
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) values.at[i * (VECTOR / TOGETHER) + e] = part.at[i];
        }
        return values;
    }
    __device__ __forceinline__ void store(int column, const Pack<Element, VECTOR>& values) const {
#pragma unroll
        for (int e = 0; e < VECTOR / TOGETHER; ++e) {
            Pack<Element, TOGETHER> part;
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) part.at[i] = values.at[i * (VECTOR / TOGETHER) + e];
            store_pack(&(*this)[column + e], part);
        }
    }
};

extern "C" __global__ void pixel_shuffle_runs(const Element* x, Element* y, Shuffle shape, PackShape packs) {
    if constexpr (!DOWN) {
        gather_pack(Row<const Element>{x, shape.height, shape.width}, y, packs);
    } else {
        const PackPosition at(packs);
        wait_for_previous_launch();
        if (!at.there) return;
        Row<Element> row{y, shape.height, shape.width};
        row.seek(at.plane, at.row);
        row.store(at.column, load_pack<Element, VECTOR>(x + 1LL * at.pack * VECTOR));
    }
}
