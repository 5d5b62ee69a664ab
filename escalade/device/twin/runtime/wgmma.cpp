// wgmma: the first thread of a warpgroup to need a product computes all of it, the others take their registers
// from it; the k-th wgmma of all its threads must agree. Late, that happens only when its group is waited for.
//
// A product is added up in fp32 and then to the accumulator; the card's rounding inside differs.
#include "units.h"

namespace twin {
namespace {

constexpr int ROWS = 64, CHUNK_BYTES = 16, DEPTH_BYTES = 32;  // every wgmma takes 32 bytes of each row

// From a descriptor. K-major, a row of memory holds elements along K, and `stride` leads to the next 8 rows.
// Transposed (MN-major, of 16-bit elements), a row holds 64 elements along M or N of one k; `stride` leads to the next
// 8 of K, `leading` to the next 64 along M or N.
struct Operand {
    u32 start, leading, stride, mode;
    bool transposed;
    Operand(u64 descriptor, bool transposed)
        : start((descriptor & 0x3FFF) << 4), leading((descriptor >> 16 & 0x3FFF) << 4),
          stride((descriptor >> 32 & 0x3FFF) << 4), mode((4 - (descriptor >> 62)) & 3), transposed(transposed) {}
    u32 pitch() const { return 16u << mode; }
    // visit(offset, bytes) for the ranges that it lies in.
    template <class Visit>
    void for_each_range(int rows, Visit visit) const {
        const u32 first = start & ~(pitch() - 1);
        if (!transposed) return visit(first, (rows / 8 - 1) * stride + 8 * pitch());
        for (int block = 0; block * 64 < rows; ++block) visit(first + block * leading, stride + 8 * pitch());
    }
};

int bytes_of(Element element) { return element == Element::tf32 ? 4 : element == Element::e4m3 ? 1 : 2; }

int elements(Element element, const unsigned char* chunk, float* values) {  // of 16 bytes
    if (element == Element::tf32) {
        for (int i = 0; i < 4; ++i) {
            u32 bits;
            std::memcpy(&bits, chunk + 4 * i, 4);
            values[i] = __builtin_bit_cast(float, bits & ~0x1FFFu);
        }
        return 4;
    }
    if (element == Element::e4m3) {
        for (int i = 0; i < CHUNK_BYTES; ++i) values[i] = from_e4m3(chunk[i]);
        return CHUNK_BYTES;
    }
    for (int i = 0; i < 8; ++i) {
        u16 bits;
        std::memcpy(&bits, chunk + 2 * i, 2);
        values[i] = element == Element::f16 ? float(__builtin_bit_cast(Half, bits))
                                            : __builtin_bit_cast(float, u32(bits) << 16);
    }
    return 8;
}

// put(row, k, value) for the elements of an operand; its rows are those of A, or columns of B.
template <class Put>
void for_each_element(Element element, const Operand& operand, int rows, Put put) {
    float values[CHUNK_BYTES];
    if (operand.transposed) {
        for (int k = 0; k < 16; ++k)
            for (int row = 0; row < rows; row += 8) {
                const u32 linear = operand.start + row / 64 * operand.leading + k / 8 * operand.stride +
                                   k % 8 * operand.pitch() + row % 64 * 2;
                elements(element, self()->owner->arena + swizzled(linear, operand.mode), values);
                for (int i = 0; i < 8; ++i) put(row + i, k, values[i]);
            }
        return;
    }
    for (int row = 0; row < rows; ++row)
        for (int chunk = 0; chunk < DEPTH_BYTES / CHUNK_BYTES; ++chunk) {
            const u32 first = operand.start + row / 8 * operand.stride + row % 8 * operand.pitch();
            const u32 linear = first + chunk * CHUNK_BYTES;
            const int count = elements(element, self()->owner->arena + swizzled(linear, operand.mode), values);
            for (int i = 0; i < count; ++i) put(row, chunk * count + i, values[i]);
        }
}

void compute(Product& product) {
    float a[ROWS][DEPTH_BYTES], b[DEPTH_BYTES][256];
    const Operand rows(product.a, product.rows_transposed), columns(product.b, product.columns_transposed);
    rows.for_each_range(ROWS, [&](u32 offset, u32 bytes) {
        use_shared(own_rank(), offset, bytes, false, true, "wgmma (rows)", product.where);
    });
    columns.for_each_range(product.n, [&](u32 offset, u32 bytes) {
        use_shared(own_rank(), offset, bytes, false, true, "wgmma (columns)", product.where);
    });
    for_each_element(product.element, rows, ROWS, [&](int row, int k, float value) { a[row][k] = value; });
    for_each_element(product.element, columns, product.n, [&](int row, int k, float value) { b[k][row] = value; });
    const int depth = DEPTH_BYTES / bytes_of(product.element);
    product.values.assign(ROWS * product.n, 0.f);
    for (int m = 0; m < ROWS; ++m) {
        float* sum = &product.values[m * product.n];
        for (int k = 0; k < depth; ++k)
            for (int n = 0; n < product.n; ++n) sum[n] += a[m][k] * b[k][n];
    }
}

Warpgroup& warpgroup() { return units_state().blocks[own_rank()].warpgroups[self()->number / 128]; }

// This thread's registers of a product: 4*block + 2*half + i is row 16*warp + 8*half + lane/4, column
// 8*block + 2*(lane%4) + i.
void apply(const Fragment& fragment) {
    Warpgroup& group = warpgroup();
    Product& product = group.products[fragment.product - group.first];
    if (product.values.empty()) compute(product);
    const int warp = self()->number / 32 % 4, row = 16 * warp + lane() / 4;
    for (int half = 0; half < 2; ++half) {
        const float* values = &product.values[(row + 8 * half) * product.n + 2 * (lane() % 4)];
        for (int block = 0; block < product.n / 8; ++block)
            for (int i = 0; i < 2; ++i) {
                float& d = fragment.d[4 * block + 2 * half + i];
                d = values[8 * block + i] + (fragment.accumulate ? d : 0.f);
            }
    }
    ++product.taken;
    while (!group.products.empty() && group.products.front().taken == 128) group.products.pop_front(), ++group.first;
}

}  // namespace

bool still_reads(const Product& product, u32 offset, u32 bytes) {
    const Operand a(product.a, product.rows_transposed), b(product.b, product.columns_transposed);
    bool found = false;
    const auto look = [&](u32 first, u32 length) { found = found || overlap(first, length, offset, bytes); };
    a.for_each_range(ROWS, look);
    b.for_each_range(product.n, look);
    return found;
}

void wgmma_issue(Element element, float* d, int n, u64 a, u64 b, bool accumulate, Where where, bool rows_transposed,
                 bool columns_transposed) {
    for (u64 descriptor : {a, b})
        if (!(descriptor >> 62) || descriptor >> 49 & 7)
            fail(where, "the twin knows wgmma operands that are swizzled, with base offset 0; this descriptor is %#llx",
                 descriptor);
    if ((rows_transposed && a >> 62 != 1) || (columns_transposed && b >> 62 != 1))
        fail(where, "the twin knows transposed wgmma operands that are swizzled within 128 bytes");
    if (self()->number / 128 * 128 + 128 > machine->launch->block_threads())
        fail(where, "wgmma in a warpgroup of fewer than 128 threads");
    Warpgroup& group = warpgroup();
    const u64 number = mine().products++;
    if (number == group.first + group.products.size()) {
        group.products.push_back({element, a, b, n, rows_transposed, columns_transposed, where, 0, {}});
    } else {
        const Product& product = group.products[number - group.first];
        if (product.a != a || product.b != b || product.n != n || product.where.line != where.line)
            fail(where, "the threads of a warpgroup disagree about their wgmma number %llu (another is at %s)", number,
                 place(product.where).c_str());
    }
    const Fragment fragment{d, number, accumulate, mine().product_group};
    if (settings().late) mine().fragments.push_back(fragment);
    else apply(fragment);
}

void wgmma_close_group() { ++mine().product_group; }

void wgmma_wait_groups(u32 pending) {
    ThreadUnits& unit = mine();
    size_t done = 0;
    for (; done < unit.fragments.size() && unit.fragments[done].group + pending < unit.product_group; ++done)
        apply(unit.fragments[done]);
    unit.fragments.erase(unit.fragments.begin(), unit.fragments.begin() + done);
}

}  // namespace twin
