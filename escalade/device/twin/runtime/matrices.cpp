// mma, ldmatrix and stmatrix: the last lane to arrive does the work of the warp.
#include "counting.h"
#include "units.h"

namespace twin {
namespace {

constexpr unsigned WHOLE_WARP = ~0u;

void need_all_lanes(unsigned mask, const char* what, Where where) {
    if (mask != WHOLE_WARP) fail(where, "%s by lanes %08x: the others have returned", what, mask);
}

// ------------------------------------------------------------------ elements to floats

float half_at(u32 pair, int which) { return float(__builtin_bit_cast(Half, u16(pair >> 16 * which))); }
float bfloat_at(u32 pair, int which) { return __builtin_bit_cast(float, pair >> 16 * which << 16); }
float tf32(u32 bits) { return __builtin_bit_cast(float, bits & ~0x1FFFu); }  // the hardware ignores 13 bits

struct Multiplication {
    Element element;
    float* d;
    const u32 *a, *b;
};

int depth_of(Element element) { return element == Element::tf32 ? 8 : element == Element::e4m3 ? 32 : 16; }

// Element `which` of a register.
float element_of(Element element, u32 bits, int which) {
    switch (element) {
        case Element::f16: return half_at(bits, which);
        case Element::bf16: return bfloat_at(bits, which);
        case Element::e4m3: return from_e4m3(bits >> 8 * which & 0xFF);
        default: return tf32(bits);
    }
}

// Fragment layout of a lane (group = lane / 4, member = lane % 4): rows group and group + 8 of A, column group of B.
// Along K a register holds adjacent elements from member times their number on; the second register is half of K later.
void multiply_lanes(void* const* lanes, unsigned mask, Where where) {
    need_all_lanes(mask, "mma", where);
    float a[16][32], b[32][8], d[16][8];
    const Element element = static_cast<const Multiplication*>(lanes[0])->element;
    const int depth = depth_of(element), each = depth / 8;
    if (is_counted()) counting::product(16 * 8 * depth);
    for (int lane = 0; lane < 32; ++lane) {
        const auto& mine = *static_cast<const Multiplication*>(lanes[lane]);
        const int group = lane / 4, member = lane % 4;
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < each; ++i) {
                const int k = each * member + i + depth / 2 * half;
                a[group][k] = element_of(element, mine.a[2 * half], i);
                a[group + 8][k] = element_of(element, mine.a[2 * half + 1], i);
                b[k][group] = element_of(element, mine.b[half], i);
            }
    }
    for (int m = 0; m < 16; ++m) {
        float sum[8] = {};
        for (int k = 0; k < depth; ++k)
            for (int n = 0; n < 8; ++n) sum[n] += a[m][k] * b[k][n];
        for (int n = 0; n < 8; ++n) d[m][n] = sum[n];
    }
    for (int lane = 0; lane < 32; ++lane) {
        float* to = static_cast<const Multiplication*>(lanes[lane])->d;
        for (int i = 0; i < 4; ++i) to[i] += d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}

// ------------------------------------------------------------------ 8x8 matrices in shared memory

struct Matrices {
    u32 row;  // lane 8 * i + j: the address of row j of matrix i
    u32* values;
    int count;
    bool transposed;
};

// Counts the rows of the whole warp as one request.
void count_rows(void* const* lanes, bool write, Where where) {
    if (!is_counted()) return;
    u32 rows[32];
    for (int lane = 0; lane < 32; ++lane) rows[lane] = static_cast<const Matrices*>(lanes[lane])->row;
    counting::matrices(rows, static_cast<const Matrices*>(lanes[0])->count, write, where);
}

// Element e of a lane's register of a matrix, located by the row addresses of the lanes.
u16* element_at(void* const* lanes, int lane, int matrix, int e, bool transposed) {
    const int major = lane / 4, minor = 2 * (lane % 4) + e;
    const int row = transposed ? minor : major, column = transposed ? major : minor;
    const u32 address = static_cast<const Matrices*>(lanes[8 * matrix + row])->row;
    return reinterpret_cast<u16*>(self()->owner->arena + address) + column;
}

void load_lanes(void* const* lanes, unsigned mask, Where where) {
    need_all_lanes(mask, "ldmatrix", where);
    count_rows(lanes, false, where);
    for (int lane = 0; lane < 32; ++lane) {
        const auto& mine = *static_cast<const Matrices*>(lanes[lane]);
        for (int matrix = 0; matrix < mine.count; ++matrix)
            mine.values[matrix] = *element_at(lanes, lane, matrix, 0, mine.transposed)
                                  | u32(*element_at(lanes, lane, matrix, 1, mine.transposed)) << 16;
    }
}

void store_lanes(void* const* lanes, unsigned mask, Where where) {
    need_all_lanes(mask, "stmatrix", where);
    count_rows(lanes, true, where);
    for (int lane = 0; lane < 32; ++lane) {
        const auto& mine = *static_cast<const Matrices*>(lanes[lane]);
        for (int matrix = 0; matrix < mine.count; ++matrix)
            for (int e = 0; e < 2; ++e)
                *element_at(lanes, lane, matrix, e, mine.transposed) = u16(mine.values[matrix] >> 16 * e);
    }
}

void check_row(u32 row, int count, bool write, const char* what, Where where) {
    if (int(lane()) >= 8 * count) return;  // its address is not used
    if (row % 16) fail(where, "%s of a row at shared %#x, which is no multiple of 16", what, row);
    const SharedLayout& layout = machine->launch->layout;
    if (!layout.inside(row, 16)) fail(where, "%s outside shared memory: %s", what, layout.describe(row).c_str());
    if (checking()) checks::touch_shared(self()->owner->rank, row, 16, write, false, where);
}

void need_whole_warp(const char* what, Where where) {
    if (warp_lanes() != WHOLE_WARP) fail(where, "%s in a warp of fewer than 32 threads", what);
}

}  // namespace

void wait::multiply(Element element, float* d, const u32* a, const u32* b, Where where) {
    need_whole_warp("mma", where);
    Multiplication mine{element, d, a, b};
    collective(WHOLE_WARP, &mine, multiply_lanes, "mma", where);
}

void wait::load_matrices(u32 row, u32* values, int count, bool transposed, Where where) {
    need_whole_warp("ldmatrix", where);
    check_row(row, count, false, "ldmatrix", where);
    Matrices mine{row, values, count, transposed};
    collective(WHOLE_WARP, &mine, load_lanes, "ldmatrix", where);
}

void wait::store_matrices(u32 row, const u32* values, int count, bool transposed, Where where) {
    need_whole_warp("stmatrix", where);
    check_row(row, count, true, "stmatrix", where);
    Matrices mine{row, const_cast<u32*>(values), count, transposed};
    collective(WHOLE_WARP, &mine, store_lanes, "stmatrix", where);
}

}  // namespace twin
