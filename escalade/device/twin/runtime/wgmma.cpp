// wgmma: the first thread of a warpgroup that needs a product computes all of it, the others copy their registers from
// it. The k-th wgmma of all threads must agree. With late operations, products are computed when their group is waited
// for.
//
// A product is summed in fp32 and then added to the accumulator; the rounding of tensor cores differs.
#include "counting.h"
#include "units.h"

namespace twin {
namespace {

constexpr int CHUNK_BYTES = 16, DEPTH_BYTES = 32;  // every wgmma takes 32 bytes of each row
constexpr u64 DESCRIPTOR_BITS = 0xC00E3FFF3FFF3FFFull;  // the others are reserved

// Operand of a descriptor. K-major: a row of memory holds 16 bytes along K (32, 64 or 128 with a swizzle). `leading` is
// the distance to the next 16 bytes without a swizzle, `stride` that to the next 8 rows. Transposed (MN-major, 16-bit):
// a row holds 64 elements along M or N of one k. `stride` is the distance to the next 8 of K, `leading` to the next 64
// of M or N.
struct Operand {
    u32 start, leading, stride, mode;
    bool transposed;
    Operand(u64 descriptor, bool transposed)
        : start((descriptor & 0x3FFF) << 4), leading((descriptor >> 16 & 0x3FFF) << 4),
          stride((descriptor >> 32 & 0x3FFF) << 4), mode((4 - (descriptor >> 62)) & 3), transposed(transposed) {}
    u32 pitch() const { return 16u << mode; }
    u32 chunk(int row, int number) const {  // offset of 16 bytes of a row, K-major
        const u32 linear = start + row / 8 * stride + row % 8 * pitch() + number * (mode ? CHUNK_BYTES : leading);
        return swizzled(linear, mode);
    }
    u32 chunk_of_k(int row, int k) const {  // offset of 8 rows of one k, transposed
        return swizzled(start + row / 64 * leading + k / 8 * stride + k % 8 * pitch() + row % 64 * 2, mode);
    }
    // visit(offset) for the chunks of 16 bytes that hold rows from `first` to `last`.
    template <class Visit>
    void for_each_chunk(int first, int last, Visit visit) const {
        for (int row = first; row < last; row += transposed ? 8 : 1)
            for (int i = 0; i < (transposed ? 16 : DEPTH_BYTES / CHUNK_BYTES); ++i)
                visit(transposed ? chunk_of_k(row, i) : chunk(row, i));
    }
    // visit(offset, bytes) for ranges that cover the operand, and possibly more.
    template <class Visit>
    void for_each_range(int rows, Visit visit) const {
        const u32 first = start & ~(pitch() - 1), group = (rows / 8 - 1) * stride + 8 * pitch();
        if (!transposed && mode) return visit(first, group);
        if (!transposed) return visit(first, group), visit(first + leading, group);
        for (int block = 0; block * 64 < rows; ++block) visit(first + block * leading, stride + 8 * pitch());
    }
};

int bytes_of(Element element) {
    return element == Element::tf32 ? 4 : element == Element::e4m3 || element == Element::s8 ? 1 : 2;
}

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
    if (element == Element::s8) {
        for (int i = 0; i < CHUNK_BYTES; ++i) values[i] = int8_t(chunk[i]);
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

// put(row, k, value) for the elements of an operand; its rows are rows of A or columns of B.
template <class Put>
void for_each_element(Element element, const Operand& operand, int rows, Put put) {
    float values[CHUNK_BYTES];
    const unsigned char* arena = self()->owner->arena;
    if (operand.transposed) {
        for (int k = 0; k < 16; ++k)
            for (int row = 0; row < rows; row += 8) {
                elements(element, arena + operand.chunk_of_k(row, k), values);
                for (int i = 0; i < 8; ++i) put(row + i, k, values[i]);
            }
        return;
    }
    for (int row = 0; row < rows; ++row)
        for (int chunk = 0; chunk < DEPTH_BYTES / CHUNK_BYTES; ++chunk) {
            const int count = elements(element, arena + operand.chunk(row, chunk), values);
            for (int i = 0; i < count; ++i) put(row, chunk * count + i, values[i]);
        }
}

// The rows of a warp from its lanes' registers, in the fragment layout of mma.
template <class Put>
void for_each_register(const Product& product, int warp, Put put) {
    float values[CHUNK_BYTES];
    for (int lane = 0; lane < 32; ++lane) {
        const u32* registers = &product.registers[(warp * 32 + lane) * ROWS_REGISTERS];
        const int count = elements(product.element, reinterpret_cast<const unsigned char*>(registers), values);
        const int each = count / ROWS_REGISTERS;  // elements per register, adjacent along K
        for (int i = 0; i < count; ++i)
            put(16 * warp + lane / 4 + i / each % 2 * 8, i / each / 2 * 4 * each + lane % 4 * each + i % each, values[i]);
    }
}

constexpr unsigned ALL_WARPS = (1 << WARPGROUP_WARPS) - 1;

void compute(Product& product, int warp) {
    float a[PRODUCT_ROWS][DEPTH_BYTES], b[DEPTH_BYTES][256];
    const auto put_row = [&](int row, int k, float value) { a[row][k] = value; };
    if (product.rows_in_registers) for_each_register(product, warp, put_row);
    else for_each_element(product.element, {product.a, product.rows_transposed}, PRODUCT_ROWS, put_row);
    for_each_element(product.element, {product.b, product.columns_transposed}, product.n,
                     [&](int row, int k, float value) { b[k][row] = value; });
    const int depth = DEPTH_BYTES / bytes_of(product.element);
    product.values.resize(PRODUCT_ROWS * product.n);
    const int first = product.rows_in_registers ? 16 * warp : 0;
    const int last = product.rows_in_registers ? first + 16 : PRODUCT_ROWS;
    for (int m = first; m < last; ++m) {
        float* sum = &product.values[m * product.n];
        for (int k = 0; k < depth; ++k)
            for (int n = 0; n < product.n; ++n) sum[n] += a[m][k] * b[k][n];
    }
    product.computed |= product.rows_in_registers ? 1u << warp : ALL_WARPS;
}

Warpgroup& warpgroup() { return units_state().blocks[own_rank()].warpgroups[self()->number / 128]; }

int own_warp() { return self()->number / 32 % WARPGROUP_WARPS; }

// This thread's registers of a product: 4*block + 2*half + i is row 16*warp + 8*half + lane/4, column
// 8*block + 2*(lane%4) + i.
void apply(const Fragment& fragment) {
    Warpgroup& group = warpgroup();
    Product& product = group.products[fragment.product - group.first];
    if (!(product.computed >> own_warp() & 1)) compute(product, own_warp());
    const int row = 16 * own_warp() + lane() / 4;
    for (int half = 0; half < 2; ++half) {
        const float* values = &product.values[(row + 8 * half) * product.n + 2 * (lane() % 4)];
        for (int block = 0; block < product.n / 8; ++block)
            for (int i = 0; i < 2; ++i) {
                float& d = fragment.d[4 * block + 2 * half + i];
                if (product.element == Element::s8) {  // 32 products of 14 bits: exact in fp32; sums wrap around
                    const u32 sum = fragment.accumulate ? __builtin_bit_cast(u32, d) : 0;
                    d = __builtin_bit_cast(float, u32(int(values[8 * block + i])) + sum);
                } else {
                    d = values[8 * block + i] + (fragment.accumulate ? d : 0.f);
                }
            }
    }
    ++product.taken;
    while (!group.products.empty() && group.products.front().taken == 128) group.products.pop_front(), ++group.first;
}

// ------------------------------------------------------------------ checks

void check_descriptor(u64 descriptor, bool transposed, Where where) {
    if (descriptor & ~DESCRIPTOR_BITS)
        fail(where, "the wgmma descriptor %#llx has reserved bits set: an address or an offset is too large for its field",
             descriptor);
    if (descriptor >> 49 & 7)
        fail(where, "the twin knows wgmma operands with base offset 0; this descriptor is %#llx", descriptor);
    if (transposed && descriptor >> 62 != 1)
        fail(where, "the twin knows transposed wgmma operands that are swizzled within 128 bytes");
    if (!transposed && descriptor >> 62 && (descriptor >> 16 & 0x3FFF) > 1)
        fail(where, "the leading offset of a swizzled K-major operand is not used, and 1 stands for that; this descriptor is"
             " %#llx", descriptor);
}

// Reports the reads of this warp's part of a product to the checks: all columns, and its own rows.
void tell_operands(const Product& product, Stamp stamp) {
    const auto read = [&](u32 offset) {
        checks::touch_shared(own_rank(), offset, CHUNK_BYTES, false, true, product.where, stamp);
    };
    const int first = product.rows_transposed ? 0 : 16 * own_warp();
    if (!product.rows_in_registers)
        Operand(product.a, product.rows_transposed).for_each_chunk(first, product.rows_transposed ? 64 : first + 16, read);
    Operand(product.b, product.columns_transposed).for_each_chunk(0, product.n, read);
}

void check_operands(const Product& product) {
    const auto look = [&](const char* what) {
        return [&, what](u32 offset, u32 bytes) { check_flights(own_rank(), offset, bytes, false, what, product.where); };
    };
    if (!product.rows_in_registers)
        Operand(product.a, product.rows_transposed).for_each_range(PRODUCT_ROWS, look("wgmma (rows)"));
    Operand(product.b, product.columns_transposed).for_each_range(product.n, look("wgmma (columns)"));
}

Fragment issue(const Product& wanted, float* d, bool accumulate, const u32* rows = nullptr) {
    const Where where = wanted.where;
    if (!wanted.rows_in_registers) check_descriptor(wanted.a, wanted.rows_transposed, where);
    check_descriptor(wanted.b, wanted.columns_transposed, where);
    if (self()->number / 128 * 128 + 128 > machine->launch->block_threads())
        fail(where, "wgmma in a warpgroup of fewer than 128 threads");
    Warpgroup& group = warpgroup();
    const u64 number = mine().products++;
    if (number == group.first + group.products.size()) {
        check_operands(wanted);
        group.products.push_back(wanted);
    } else {
        const Product& product = group.products[number - group.first];
        if (product.a != wanted.a || product.b != wanted.b || product.n != wanted.n || product.where.line != where.line)
            fail(where, "the threads of a warpgroup disagree about their wgmma number %llu (another is at %s)", number,
                 place(product.where).c_str());
    }
    const Fragment fragment{d, wanted.n / 2, number, accumulate, mine().product_group, mine().wgmma_fence, where};
    registers::begin(fragment, rows);
    if (checking() && !lane()) tell_operands(wanted, {uint16_t(agent_at(group.agents[own_warp()])), u32(number + 1)});
    if (is_counted() && !lane()) counting::product(16 * wanted.n * DEPTH_BYTES / bytes_of(wanted.element));
    return fragment;
}

void finish_issue(const Fragment& fragment) {
    if (following()) mine().fragments.push_back(fragment);
    if (!settings().late) apply(fragment);
}

}  // namespace

bool still_reads(const Product& product, u32 offset, u32 bytes) {
    bool found = false;
    if (product.computed == ALL_WARPS) return false;
    const auto look = [&](u32 first, u32 length) { found = found || overlap(first, length, offset, bytes); };
    if (!product.rows_in_registers) Operand(product.a, product.rows_transposed).for_each_range(PRODUCT_ROWS, look);
    Operand(product.b, product.columns_transposed).for_each_range(product.n, look);
    return found;
}

void wgmma_issue(Element element, float* d, int n, u64 a, u64 b, bool accumulate, Where where, bool rows_transposed,
                 bool columns_transposed) {
    finish_issue(issue({element, a, b, n, rows_transposed, columns_transposed, false, where}, d, accumulate));
}

// Synchronizes the warp, because each lane holds a part of the rows.
void wait::wgmma_from_registers(Element element, float* d, int n, const u32* a, u64 b, bool accumulate, Where where) {
    const Fragment fragment = issue({element, 0, b, n, false, false, true, where}, d, accumulate, a);
    Warpgroup& group = warpgroup();
    auto& registers = group.products[fragment.product - group.first].registers;
    registers.resize(128 * ROWS_REGISTERS);
    std::copy(a, a + ROWS_REGISTERS, &registers[self()->number % 128 * ROWS_REGISTERS]);
    collective(~0u, nullptr, nullptr, "wgmma", where);
    finish_issue(fragment);
}

void wgmma_close_group() { ++mine().product_group; }

void wgmma_wait_groups(u32 pending) {
    ThreadUnits& unit = mine();
    size_t done = 0;
    for (; done < unit.fragments.size() && unit.fragments[done].group + pending < unit.product_group; ++done)
        if (settings().late) apply(unit.fragments[done]);
    if (!done) return;
    if (checking()) self()->clock.raise(agent_at(warpgroup().agents[own_warp()]), u32(unit.fragments[done - 1].product + 1));
    const std::vector<Fragment> over(unit.fragments.begin(), unit.fragments.begin() + done);
    unit.fragments.erase(unit.fragments.begin(), unit.fragments.begin() + done);
    if (checking())
        for (const Fragment& fragment : over) registers::end(fragment);
}

void set_registers(u32 count) { mine().registers = count; }

void wait::wgmma_fence(Where where) {
    warp_barrier(~0u, "wgmma.fence", where);
    registers::fence();
}

}  // namespace twin
