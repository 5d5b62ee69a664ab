// TMA: boxes of a tensor, or im2col windows of a convolution, to and from shared memory. With late operations, a load
// completes only when no thread can run, and a store reads its source only when its issuer waits for it.
#include "counting.h"
#include "units.h"

namespace twin {
namespace {

MapFields fields_of(const TensorMap& map, int rank, bool im2col, Where where) {
    MapFields fields;
    std::memcpy(&fields, &map, sizeof fields);
    static_assert(sizeof(MapFields) <= sizeof(TensorMap));
    if (std::memcmp(fields.mark, "TWN", 3)) fail(where, "this is no tensor map that the twin encoded");
    if (fields.rank != rank) fail(where, "a copy in %d dimensions with a map of %d", rank, fields.rank);
    if (fields.im2col != im2col) fail(where, "a tiled copy of an im2col map, or the other way round");
    return fields;
}

u32 row_bytes(const MapFields& map) { return map.box[0] * map.element_bytes; }

u32 box_rows(const MapFields& map) {
    if (map.im2col) return map.pixels;
    u32 rows = 1;
    for (u32 d = 1; d < map.rank; ++d) rows *= map.box[d];
    return rows;
}

unsigned char* row_address(const MapFields& map, const long long* position) {  // null outside the tensor
    u64 address = map.base;
    for (u32 d = 1; d < map.rank; ++d) {
        if (position[d] < 0 || position[d] >= (long long)map.size[d]) return nullptr;
        address += u64(position[d]) * map.stride[d - 1];
    }
    return reinterpret_cast<unsigned char*>(address);
}

// visit(row, address of the row's element 0 along dimension 0, or null outside the tensor).
template <class Visit>
void for_each_row(const MapFields& map, const int* at, const u16* taps, Visit visit) {
    long long position[5], corner[5];
    const u32 rows = box_rows(map), spatial = map.rank - 2;
    for (u32 d = 0; d < map.rank; ++d) corner[d] = at[d];
    for (u32 row = 0; row < rows; ++row) {
        if (!map.im2col) {
            for (u32 d = 1, rest = row; d < map.rank; rest /= map.box[d++])
                position[d] = at[d] + int(rest % map.box[d]);
            visit(row, row_address(map, position));
            continue;
        }
        for (u32 d = 1; d < map.rank; ++d) position[d] = corner[d] + (d <= spatial ? taps[d - 1] : 0);
        visit(row, row_address(map, position));
        // The window's corner advances by the stride between the two corners of the bounding box.
        for (u32 d = 1; d < map.rank; ++d) {
            corner[d] += d <= spatial ? map.step[d] : 1;
            if (d > spatial || corner[d] <= (long long)map.size[d] - 1 + map.upper[d - 1]) break;
            corner[d] = map.lower[d - 1];
        }
    }
}

// A GPU raises an illegal instruction if the first bytes of a row are not aligned. im2col pixels have their channels
// innermost, and are aligned if those are.
void check_first(const MapFields& map, const int* at, Where where) {
    if ((long long)at[0] * map.element_bytes % 16)
        fail(where, "a copy that begins at element %d of %d bytes: TMA needs multiples of 16 bytes", at[0], map.element_bytes);
}

struct Bounds { int low, high; };  // bytes of a row that are inside the tensor along dimension 0

Bounds inner_bounds(const MapFields& map, int x) {
    const int first = std::clamp(-x, 0, int(map.box[0]));
    const int last = int(std::clamp<long long>((long long)map.size[0] - x, 0, map.box[0]));
    return {first * map.element_bytes, last * map.element_bytes};
}

// move(offset in the arena, byte in the row) for the 16-byte chunks of a row.
template <class Move>
void for_each_chunk(const MapFields& map, u32 row_start, Move move) {
    for (u32 byte = 0; byte < row_bytes(map); byte += 16) move(swizzled(row_start + byte, map.swizzle), int(byte));
}

void tell_global(const MapFields& map, const int* at, const u16* taps, bool write, Where where, Stamp stamp = {}) {
    if (is_counted()) counting::bulk(write);
    if (!checking() && !is_counted()) return;
    const Bounds bounds = inner_bounds(map, at[0]);
    for_each_row(map, at, taps, [&](u32, const unsigned char* row) {
        if (!row || bounds.high <= bounds.low) return;
        const unsigned char* first = row + (long long)at[0] * map.element_bytes + bounds.low;
        if (is_counted()) counting::bulk_row(first, bounds.high - bounds.low, write);
        if (checking()) checks::touch_global(first, bounds.high - bounds.low, write, where, stamp);
    });
}

void perform(const Store& store) {
    const MapFields& map = store.map;
    const unsigned char* arena = self()->owner->arena;
    const Bounds bounds = inner_bounds(map, store.at[0]);
    for_each_row(map, store.at, nullptr, [&](u32 row, unsigned char* target) {
        if (!target) return;
        for_each_chunk(map, store.source + row * row_bytes(map), [&](u32 from, int byte) {
            const int begin = std::max(bounds.low, byte), end = std::min(bounds.high, byte + 16);
            if (end > begin)
                std::memcpy(target + (long long)store.at[0] * map.element_bytes + begin, arena + from + (begin - byte),
                            end - begin);
        });
    });
}

}  // namespace

void perform(const Load& load) {
    const MapFields& map = load.map;
    const Bounds bounds = inner_bounds(map, load.at[0]);
    for (u32 rank = 0; rank < machine->blocks.size(); ++rank) {
        if (!(load.blocks >> rank & 1)) continue;
        unsigned char* arena = machine->blocks[rank].arena;
        for_each_row(map, load.at, load.taps, [&](u32 row, const unsigned char* source) {
            for_each_chunk(map, load.destination + row * row_bytes(map), [&](u32 to, int byte) {
                const int from = std::max(bounds.low, byte), until = std::min(bounds.high, byte + 16);
                if (until - from < 16 || !source) std::memset(arena + to, 0, 16);
                if (source && until > from)
                    std::memcpy(arena + to + (from - byte), source + (long long)load.at[0] * map.element_bytes + from,
                                until - from);
            });
        });
        Mbarrier& barrier = barrier_at(load.barrier, rank, "a load's completion", load.where);
        barrier.bytes -= load.bytes;
        if (checking()) barrier.arriving.join(load.clock);
        complete_if_done(barrier);
    }
}

void tensor_load(u32 destination, const TensorMap& map, u32 barrier, const int* at, int rank, const u16* taps,
                 u32 blocks, Where where) {
    Load load{fields_of(map, rank, taps, where), {}, {}, destination, barrier, blocks, 0, where, name(*self()), {}};
    load.bytes = box_rows(load.map) * row_bytes(load.map);
    std::copy(at, at + rank, load.at);
    if (taps) std::copy(taps, taps + rank - 2, load.taps);
    if (destination % 128) fail(where, "a load to shared %#x, which is no multiple of 128", destination);
    check_first(load.map, load.at, where);
    tell_global(load.map, load.at, load.taps, false, where);
    for (u32 target = 0; target < 32; ++target) {
        if (!(blocks >> target & 1)) continue;
        check_present(target, "a load", where);
        Mbarrier& counted = barrier_at(barrier, target, "a load", where);
        check_initialized(counted, barrier, target, true, "a load", where);
        const Stamp stamp = arrival_stamp(counted);
        visit(target, stamp, where);
        use_shared(target, destination, load.bytes, true, true, "a load", where, stamp);
        if (settings().late) std::memset(machine->blocks[target].arena + destination, POISON, load.bytes);
    }
    release(load.clock);  // completion of the load implies everything before its issue
    if (settings().late) units_state().loads.push_back(load);
    else perform(load);
}

void tensor_store(const TensorMap& map, u32 source, const int* at, int rank, Where where) {
    ThreadUnits& unit = mine();
    Store store{fields_of(map, rank, false, where), {}, source, 0, unit.store_group, where};
    store.bytes = box_rows(store.map) * row_bytes(store.map);
    std::copy(at, at + rank, store.at);
    check_first(store.map, store.at, where);
    if (source % 128) fail(where, "a store from shared %#x, which is no multiple of 128", source);
    const u32 count = unit.store_group + 1;
    use_shared(own_rank(), source, store.bytes, false, true, "a store", where,
               {uint16_t(agent_at(unit.store_reader)), count});
    tell_global(store.map, store.at, nullptr, true, where, {uint16_t(agent_at(unit.store_writer)), count});
    if (!settings().late) perform(store);
    if (following()) unit.stores.push_back(store);
}

void tensor_store_close_group() { ++mine().store_group; }

// Frees the sources of all groups but `pending`; their writes are visible to the next launch.
void tensor_store_wait_read(u32 pending) {
    ThreadUnits& unit = mine();
    if (unit.store_group <= pending) return;
    const u32 done = unit.store_group - pending;  // groups
    size_t over = 0;
    for (; over < unit.stores.size() && unit.stores[over].group < done; ++over)
        if (settings().late) perform(unit.stores[over]);
    unit.stores.erase(unit.stores.begin(), unit.stores.begin() + over);
    if (!checking() || !unit.store_reader) return;
    self()->clock.raise(unit.store_reader, done);
}

void fence_proxy() {
    if (!checking()) return;
    self()->proxy_fences.push_back(self()->clock.at[self()->slot]++);
}

}  // namespace twin
