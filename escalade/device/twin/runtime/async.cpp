// cp.async, and the bookkeeping of all asynchronous units: which bytes of shared memory are in flight.
//
// Asynchronous operations run at once, or late: then the destination holds poison until the operation is waited for.
// Both orders are legal.
#include "counting.h"
#include "units.h"

namespace twin {

// ------------------------------------------------------------------ cp.async

namespace {

void perform(const Copy& copy) {
    unsigned char* to = self()->owner->arena + copy.destination;
    if (copy.source) std::memcpy(to, copy.source, copy.bytes);
    else std::memset(to, 0, copy.bytes);
}

}  // namespace

void copy_async(u32 shared, const void* global, u32 bytes, bool inside, Where where) {
    if (shared % bytes || (inside && reinterpret_cast<uintptr_t>(global) % bytes))
        fail(where, "cp.async of %u bytes from %p to shared %#x: both must be multiples of %u", bytes, global, shared,
             bytes);
    if (!machine->launch->layout.inside(shared, bytes))
        fail(where, "cp.async writes outside shared memory: %s", machine->launch->layout.describe(shared).c_str());
    if (checking()) {
        if (inside) checks::touch_global(global, bytes, false, where);
        checks::begin_copy(self()->owner->rank, shared, bytes, where);
    }
    if (is_counted()) counting::copy(inside ? global : nullptr, shared, bytes, where);
    const Copy copy{shared, bytes, mine().copy_group, inside ? global : nullptr, where};
    if (!settings().late) perform(copy);
    else std::memset(self()->owner->arena + shared, POISON, bytes);
    if (settings().late || checking()) mine().copies.push_back(copy);
}

void copy_async_close_group() { ++mine().copy_group; }

void copy_async_wait_groups(u32 pending) {
    ThreadUnits& unit = mine();
    size_t done = 0;
    for (; done < unit.copies.size() && unit.copies[done].group + pending < unit.copy_group; ++done) {
        const Copy& copy = unit.copies[done];
        if (settings().late) perform(copy);
        if (checking()) {
            checks::end_copy(self()->owner->rank, copy.destination, copy.bytes);
            checks::touch_shared(self()->owner->rank, copy.destination, copy.bytes, true, false, copy.where);
        }
    }
    unit.copies.erase(unit.copies.begin(), unit.copies.begin() + done);
}

// ------------------------------------------------------------------ bytes in flight

u32 agent_at(u32& agent) {
    if (!agent) agent = machine->launch->cluster_threads() + units_state().agents++;
    return agent;
}

void check_flights(u32 rank, u32 offset, u32 bytes, bool write, const char* what, Where where) {
    const SharedLayout& layout = machine->launch->layout;
    const char* verb = write ? "writes" : "reads";
    if (!layout.inside(offset, bytes))
        fail(where, "%s %s %u bytes outside shared memory: %s", what, verb, bytes,
             layout.describe(layout.inside(offset, 1) ? offset + bytes - 1 : offset).c_str());
    for (const Load& load : units_state().loads)
        if (load.blocks >> rank & 1 && overlap(load.destination, load.bytes, offset, bytes))
            fail(where, "%s %s shared bytes %#x-%#x, but the load to %#x-%#x of %s (%s) is in flight", what, verb,
                 offset, offset + bytes - 1, load.destination, load.destination + load.bytes - 1,
                 place(load.where).c_str(), load.issuer.c_str());
    const auto& pushes = units_state().blocks[rank].pushes;
    const auto push = pushes.lower_bound(offset & ~15u);
    if (push != pushes.end() && push->first < offset + bytes)
        fail(where, "%s %s shared bytes %#x-%#x, but the st.async of %s (%s) is in flight", what, verb, offset,
             offset + bytes - 1, place(push->second.where).c_str(), name(*push->second.issuer).c_str());
    if (write && settings().late) {
        for (const Warpgroup& group : units_state().blocks[rank].warpgroups)
            for (const Product& product : group.products)
                if (still_reads(product, offset, bytes))
                    fail(where, "%s writes shared bytes %#x-%#x, which the wgmma of %s still has to read", what, offset,
                         offset + bytes - 1, place(product.where).c_str());
        const unsigned per_block = machine->launch->block_threads();
        for (unsigned slot = rank * per_block; slot < (rank + 1) * per_block; ++slot)
            for (const Store& store : units_state().threads[slot].stores)
                if (overlap(store.source, store.bytes, offset, bytes))
                    fail(where, "%s writes shared bytes %#x-%#x, which the store of %s still has to read", what, offset,
                         offset + bytes - 1, place(store.where).c_str());
    }
}

void use_shared(u32 rank, u32 offset, u32 bytes, bool write, bool asynchronous, const char* what, Where where,
                Stamp stamp) {
    check_flights(rank, offset, bytes, write, what, where);
    if (checking()) checks::touch_shared(rank, offset, bytes, write, asynchronous, where, stamp);
}

// ------------------------------------------------------------------ called by the scheduler

void units::begin_cluster() {
    const unsigned per_block = machine->launch->block_threads(), blocks = machine->launch->cluster_blocks();
    if (!machine->units) machine->units = std::make_shared<Units>();
    Units& state = units_state();
    state = Units();
    state.threads.resize(blocks * per_block);
    state.blocks.resize(blocks);
    for (BlockUnits& block : state.blocks) block.warpgroups.resize((per_block + 127) / 128);
}

namespace {

bool land_push() {
    auto& blocks = units_state().blocks;
    const u32 first = settings().seed ? random_below(blocks.size()) : 0;
    for (u32 i = 0; i < blocks.size(); ++i) {
        const u32 rank = (first + i) % blocks.size();
        auto& pushes = blocks[rank].pushes;
        if (pushes.empty()) continue;
        const u32 low = pushes.begin()->first, high = pushes.rbegin()->first;
        const auto chosen = settings().seed ? pushes.lower_bound(low + random_below(high - low + 1)) : pushes.begin();
        const auto [destination, push] = *chosen;
        pushes.erase(chosen);
        perform(destination, rank, push);
        return true;
    }
    return false;
}

}  // namespace

bool units::idle() {
    auto& loads = units_state().loads;
    if (loads.empty()) return land_push();
    const u32 chosen = settings().seed ? random_below(loads.size()) : 0;
    const Load load = loads[chosen];
    loads.erase(loads.begin() + chosen);
    perform(load);
    return true;
}

void units::exit_thread(Thread& thread) {
    leave_cluster(thread);
    BlockUnits& block = units_state().blocks[thread.owner->rank];
    const bool last = ++block.exited == machine->launch->block_threads();
    if (checking()) block.left.join(thread.clock);
    if (last && !block.pushes.empty())
        fail(block.pushes.begin()->second.where, "the block has returned before its st.async has arrived");
    for (const auto& [slot, visit] : block.visits)
        if (last && !block.left.knows(slot, visit.count))
            fail(visit.where, "the block has returned, and none of its threads waited for what happens here in its shared "
                 "memory");
    const ThreadUnits& unit = units_state().threads[thread.slot];
    if (!unit.stores.empty())
        fail(unit.stores.front().where, "returns while the store may still read shared memory");
    if (!unit.fragments.empty())
        fail(unit.fragments.front().where, "returns with %zu wgmma not waited for", unit.fragments.size());
}

namespace {

// setmaxnreg: all of a warpgroup together, and no more registers than the block was started with.
void check_registers(unsigned rank) {
    const unsigned threads = machine->launch->block_threads(), started = std::min(65536 / threads, 255u) / 8 * 8;
    unsigned sum = 0;
    const auto registers = [&](unsigned number) { return units_state().threads[rank * threads + number].registers; };
    for (unsigned number = 0; number < threads; ++number) {
        if (registers(number) != registers(number / 128 * 128))
            fail({}, "setmaxnreg: threads %u and %u of a warpgroup hold %u and %u registers (0: as at the start)",
                 number / 128 * 128, number, registers(number / 128 * 128), registers(number));
        sum += registers(number) ? registers(number) : started;
    }
    if (sum > threads * started)
        fail({}, "setmaxnreg: the warps want %u registers, a block of %u threads is started with at most %u", sum, threads,
             threads * started);
}

}  // namespace

void units::end_cluster() {
    for (unsigned rank = 0; rank < units_state().blocks.size(); ++rank) {
        check_registers(rank);
        for (const auto& [address, barrier] : units_state().blocks[rank].barriers)
            if (barrier.bytes)
                fail(barrier.where, "the block has returned, and its mbarrier at shared %#x still waits for %lld bytes",
                     address, barrier.bytes);
    }
    for (const BlockUnits& block : units_state().blocks)
        for (const Warpgroup& group : block.warpgroups)
            if (!group.products.empty())
                fail(group.products.front().where, "the wgmma was issued by %d of 128 threads",
                     group.products.front().taken);
}

}  // namespace twin
