// wgmma: the first thread of a warpgroup to need a product computes all of it, the others take their registers
// from it; the k-th wgmma of all its threads must agree. Late, that happens only when its group is waited for.
//
// A product is added up in fp32 and then to the accumulator; the card's rounding inside differs.
#include "units.h"

namespace twin {
namespace {

constexpr int ROWS = 64, CHUNK_BYTES = 16, DEPTH_BYTES = 32;  // every wgmma takes 32 bytes of each row

struct Operand {  // K-major, from a descriptor
    u32 start, stride, mode;
    explicit Operand(u64 descriptor)
        : start((descriptor & 0x3FFF) << 4), stride((descriptor >> 32 & 0x3FFF) << 4),
          mode((4 - (descriptor >> 62)) & 3) {}
    u32 pitch() const { return 16u << mode; }
    u32 first() const { return start & ~(pitch() - 1); }
    u32 bytes(int rows) const { return (rows / 8 - 1) * stride + 8 * pitch(); }
};

int elements(Element element, const unsigned char* chunk, float* values) {  // of 16 bytes
    if (element == Element::tf32) {
        for (int i = 0; i < 4; ++i) {
            u32 bits;
            std::memcpy(&bits, chunk + 4 * i, 4);
            values[i] = __builtin_bit_cast(float, bits & ~0x1FFFu);
        }
        return 4;
    }
    for (int i = 0; i < 8; ++i) {
        u16 bits;
        std::memcpy(&bits, chunk + 2 * i, 2);
        values[i] = element == Element::f16 ? float(__builtin_bit_cast(Half, bits))
                                            : __builtin_bit_cast(float, u32(bits) << 16);
    }
    return 8;
}

// put(row, first element along K, values, how many) for the rows of an operand.
template <class Put>
void for_each_chunk(Element element, u64 descriptor, int rows, Put put) {
    const Operand operand(descriptor);
    float values[8];
    for (int row = 0; row < rows; ++row)
        for (int chunk = 0; chunk < DEPTH_BYTES / CHUNK_BYTES; ++chunk) {
            const u32 first = operand.start + row / 8 * operand.stride + row % 8 * operand.pitch();
            const u32 linear = first + chunk * CHUNK_BYTES;
            const int count = elements(element, self()->owner->arena + swizzled(linear, operand.mode), values);
            put(row, chunk * count, values, count);
        }
}

void compute(Product& product) {
    float a[ROWS][16], b[16][256];
    const Operand rows(product.a), columns(product.b);
    use_shared(own_rank(), rows.first(), rows.bytes(ROWS), false, true, "wgmma (rows)", product.where);
    use_shared(own_rank(), columns.first(), columns.bytes(product.n), false, true, "wgmma (columns)", product.where);
    for_each_chunk(product.element, product.a, ROWS, [&](int row, int k, const float* values, int count) {
        std::copy(values, values + count, &a[row][k]);
    });
    for_each_chunk(product.element, product.b, product.n, [&](int row, int k, const float* values, int count) {
        for (int i = 0; i < count; ++i) b[k + i][row] = values[i];
    });
    const int depth = product.element == Element::tf32 ? 8 : 16;
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
    const Operand a(product.a), b(product.b);
    return overlap(a.first(), a.bytes(ROWS), offset, bytes) || overlap(b.first(), b.bytes(product.n), offset, bytes);
}

void wgmma_issue(Element element, float* d, int n, u64 a, u64 b, bool accumulate, Where where) {
    for (u64 descriptor : {a, b})
        if (!(descriptor >> 62) || descriptor >> 49 & 7)
            fail(where, "the twin knows wgmma operands that are swizzled, with base offset 0; this descriptor is %#llx",
                 descriptor);
    if (self()->number / 128 * 128 + 128 > machine->launch->block_threads())
        fail(where, "wgmma in a warpgroup of fewer than 128 threads");
    Warpgroup& group = warpgroup();
    const u64 number = mine().products++;
    if (number == group.first + group.products.size()) {
        group.products.push_back({element, a, b, n, where, 0, {}});
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
