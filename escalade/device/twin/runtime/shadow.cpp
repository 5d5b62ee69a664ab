// Data races, uninitialized shared memory, and out-of-bounds accesses.
//
// Two accesses race if they touch the same bytes, at least one writes, not both are atomic, and nothing orders them.
// Vector clocks define the order, so findings do not depend on the schedule of this run.
#include "checks.h"
#include "counting.h"

namespace twin {

namespace checks {

thread_local State* state;
std::mutex one_launch;

namespace {

thread_local std::unique_ptr<State> kept;
constexpr uintptr_t PAGE_BYTES = 4096, NEAR_BYTES = 1 << 25;
constexpr Site IS_WHERE = 1u << 31;

// ------------------------------------------------------------------ words

std::string name_of(const Touch& touch) {
    const Launch& launch = *state->launch;
    const uint3& cluster = launch.sizes.cluster;
    const uint32_t number = touch.cluster - 1, rank = touch.slot / launch.block_threads();
    const uint32_t across = launch.sizes.grid.x / cluster.x, down = launch.sizes.grid.y / cluster.y;
    const uint3 block{number % across * cluster.x + rank % cluster.x,
                      number / across % down * cluster.y + rank / cluster.x % cluster.y,
                      number / (across * down) * cluster.z + rank / (cluster.x * cluster.y)};
    return text("thread %u of ", touch.slot % launch.block_threads()) + name(block);
}

const Range* buffer_of(uintptr_t address) {  // the last one that starts at or before it
    const Request& request = state->launch->request;
    const Range* end = request.buffers + request.buffer_count;
    const Range* next = std::upper_bound(request.buffers, end, address,
                                         [](uintptr_t value, const Range& range) { return value < range.start; });
    return next == request.buffers ? nullptr : next - 1;
}

using checks::memory_name;

std::string memory_name(uint32_t rank, uint32_t offset) {
    std::string part = "shared " + state->launch->layout.describe(offset);
    return rank == self()->owner->rank ? part : part + text(" of the cluster's block %u", rank);
}


// ------------------------------------------------------------------ order

bool ordered(const Touch& touch) {  // happens before the running thread's current access
    if (touch.cluster == machine->cluster)
        return touch.slot == self()->slot || self()->clock.knows(touch.slot, touch.clock);
    const auto& others = self()->clock.others;
    const auto found = others.find(touch.cluster);
    return found != others.end() && touch.slot < found->second.size() && found->second[touch.slot] >= touch.clock;
}

bool same_block(const Touch& one, const Touch& other) {
    const unsigned per_block = state->launch->block_threads();
    return one.cluster == other.cluster && one.slot / per_block == other.slot / per_block;
}

bool both_atomic(const Touch& one, const Touch& other) {
    return one.kind & other.kind & ATOMIC && (!((one.kind | other.kind) & IN_BLOCK) || same_block(one, other));
}

bool races(const Touch& earlier, const Touch& now) {
    return earlier.cluster && earlier.bytes & now.bytes && !both_atomic(earlier, now) && !ordered(earlier);
}

bool is_agent(const Touch& touch) { return touch.slot >= state->launch->cluster_threads(); }

template <class... Position>
[[noreturn]] void report_race(const Access& access, const Touch& other, bool other_wrote, Position... position) {
    const char* verb = access.write ? "writes" : "reads";
    const std::string memory = memory_name(position...), other_place = place(other.site);
    if (is_agent(other) && other_wrote)
        report(access.site, text("%s %s, to which the copy of %s is in flight: it was not waited for", verb,
                                 memory.c_str(), other_place.c_str()));
    if (is_agent(other))
        report(access.site, text("writes %s, which the operation of %s still has to read: it was not waited for",
                                 memory.c_str(), other_place.c_str()));
    report(access.site, text("race: %s %s, which %s %s at %s, and nothing orders the two", verb, memory.c_str(),
                             name_of(other).c_str(), other_wrote ? "wrote" : "read", other_place.c_str()));
}

// ------------------------------------------------------------------ readers

Touch reader(const Readers& readers, int lane) {
    Touch one = readers.touch;
    one.slot += lane;
    return one;
}

void forget_ordered(Readers& readers) {
    for (uint32_t left = readers.lanes; left; left &= left - 1)
        if (const int lane = __builtin_ctz(left); ordered(reader(readers, lane))) readers.lanes &= ~(1u << lane);
}

bool join(Readers& readers, const Touch& touch) {
    const Touch& first = readers.touch;
    if (first.clock != touch.clock || first.slot != touch.slot / 32 * 32 || first.cluster != touch.cluster
        || first.kind != touch.kind || !readers.lanes) return false;
    readers.lanes |= 1u << touch.slot % 32;
    return true;
}

// A reader that is ordered before another need not be kept: a write after the latter is also after the former.
void add_reader(Cell& cell, const Touch& touch, std::deque<std::vector<Readers>>& store) {
    if (join(cell.read, touch)) return;
    Readers fresh{touch, 1u << touch.slot % 32};
    fresh.touch.slot = touch.slot / 32 * 32;
    const bool alone = !cell.more || cell.more->empty();
    if (alone) forget_ordered(cell.read);
    if (alone && !cell.read.lanes) {
        cell.read = fresh;
        return;
    }
    if (!cell.more) cell.more = &store.emplace_back();
    for (Readers& readers : *cell.more)
        if (join(readers, touch)) return;
    std::vector<Readers> left;
    int others = 0;  // readers of earlier clusters
    forget_ordered(cell.read);
    if (cell.read.lanes) left.push_back(cell.read);
    for (Readers& readers : *cell.more) {
        forget_ordered(readers);
        if (!readers.lanes) continue;
        if (readers.touch.cluster != machine->cluster && ++others > 2) {
            const auto last = std::find_if(left.rbegin(), left.rend(), [](const Readers& one) {
                return one.touch.cluster != machine->cluster;
            });
            *last = readers;
            continue;
        }
        left.push_back(readers);
    }
    left.push_back(fresh);
    cell.read = left.front();
    cell.more->assign(left.begin() + 1, left.end());
}

template <class... Position>
void check_readers(const Readers& readers, const Touch& now, const Access& access, Position... position) {
    for (uint32_t left = readers.lanes; left; left &= left - 1)
        if (const Touch read = reader(readers, __builtin_ctz(left)); races(read, now))
            report_race(access, read, false, position...);
}

template <class... Position>
void touch(Cell& cell, const Access& access, uint8_t bytes, std::deque<std::vector<Readers>>& store, Position... position) {
    const Touch now{machine->cluster,       self()->clock.at[self()->slot], access.site,
                    uint16_t(self()->slot), bytes,                          access.kind};
    if (cell.flight)
        report(access.site, text("%s %s, to which the copy of %s is in flight: it was not waited for",
                                 access.write ? "writes" : "reads", memory_name(position...).c_str(),
                                 place(cell.flight).c_str()));
    if (races(cell.written, now)) report_race(access, cell.written, true, position...);
    const Touch kept = access.stamp.agent ? Touch{now.cluster, access.stamp.count, now.site, access.stamp.agent, bytes,
                                                  now.kind}
                                          : now;
    if (!access.write) return add_reader(cell, kept, store);
    check_readers(cell.read, now, access, position...);
    cell.read.lanes = 0;
    if (cell.more) {
        for (const Readers& readers : *cell.more) check_readers(readers, now, access, position...);
        cell.more->clear();
    }
    cell.written = kept;
}

// Calls f(cell, mask of its bytes, first byte) for the cell, or for its single-byte halves.
template <class F>
void each_part(Cell& cell, uint8_t bytes, std::deque<std::array<Cell, 2>>& store,
               std::deque<std::vector<Readers>>& readers, F f) {
    if (bytes == 3 && !cell.halves) return f(cell, bytes, 0);
    if (!cell.halves) {
        cell.halves = store.emplace_back(std::array<Cell, 2>{cell, cell}).data();
        if (cell.more) cell.halves[1].more = &readers.emplace_back(*cell.more);
    }
    for (uint32_t byte = 0; byte < 2; ++byte)
        if (bytes >> byte & 1) f(cell.halves[byte], uint8_t(1 << byte), byte);
}

uint8_t bytes_of(uintptr_t cell, uintptr_t start, uintptr_t end) {
    return uint8_t((start <= 2 * cell) | (end > 2 * cell + 1) << 1);
}

// ------------------------------------------------------------------ the two memories

// A thread's own stores are visible to TMA and the tensor cores only after a proxy fence.
void check_fenced(const Cell& cell, uint32_t rank, uint32_t half, const Access& access) {
    const Touch& written = cell.written;
    if (!written.cluster || written.kind & ASYNCHRONOUS || written.slot >= machine->threads.size()) return;
    if (!ordered(written)) return;  // a race, reported as such
    if (knows_proxy_fence(written.slot, written.clock)) return;
    report(access.site, text("%s %s asynchronously, which %s wrote at %s without a proxy fence of its own since",
                             access.write ? "writes" : "reads", memory_name(rank, 2 * half).c_str(),
                             name_of(written).c_str(), place(written.site).c_str()));
}

void access_shared(uint32_t rank, uint32_t offset, const Access& access) {
    const SharedLayout& layout = state->launch->layout;
    const char* verb = access.write ? "writes" : "reads";
    if (!layout.inside(offset, access.bytes)) {
        const uint32_t first_outside = layout.inside(offset, 1) ? offset + access.bytes - 1 : offset;
        report(access.site, text("%s %u bytes outside shared memory: %s", verb, access.bytes,
                                 layout.describe(first_outside).c_str()));
    }
    const uint32_t moved = (offset - home_of(offset)) / 2;
    for (uint32_t half = offset / 2; half <= (offset + access.bytes - 1) / 2; ++half) {
        const uint8_t bytes = bytes_of(half, offset, offset + access.bytes);
        each_part(state->shared[rank][half - moved], bytes, state->shared_halves, state->shared_readers,
                  [&](Cell& cell, uint8_t part, uint32_t byte) {
            if (!access.write && !cell.written.cluster && !cell.flight)
                report(access.site, "reads " + memory_name(rank, 2 * half + byte) + ", which nothing wrote");
            if (access.kind & ASYNCHRONOUS && access.stamp.agent) check_fenced(cell, rank, half, access);
            touch(cell, access, part, state->shared_readers, rank, 2 * half + byte);
        });
    }
}

void check_bounds(const Access& access) {
    const Request& request = state->launch->request;
    if (!request.buffer_count || access.address - request.library.start < request.library.bytes) return;
    for (const Relocation::Move& move : state->moves)
        if (access.address - move.to < move.bytes && access.address + access.bytes <= move.to + move.bytes) return;
    Relocation& relocation = *state->launch->relocation;
    relocation.escaped = relocation.was_moved(access.address);
    report(access.site, text("%s %u bytes outside the launch's buffers: %s", access.write ? "writes" : "reads",
                             access.bytes, near_buffer(access.address, access.bytes).c_str()));
}

Cell& global_cell(uintptr_t half) {
    static uintptr_t last_number = 0;
    static std::vector<Cell>* last_page = nullptr;
    const uintptr_t number = half / (PAGE_BYTES / 2);
    if (number != last_number || !last_page || state->pages.empty()) {
        auto& page = state->pages[number];
        if (!page) page = std::make_unique<std::vector<Cell>>(PAGE_BYTES / 2);
        last_number = number;
        last_page = page.get();
    }
    return (*last_page)[half % (PAGE_BYTES / 2)];
}

// In a launch that may start early, a thread may access global memory only after wait_for_previous_launch, its own or
// that of a thread it has synchronized with. Weights may be declared ready.
void check_waited(const Access& access) {
    const Request& request = state->launch->request;
    Thread& own = *self();
    if (!request.overlap || own.waited || access.address - request.library.start < request.library.bytes) return;
    for (const Thread& thread : machine->threads)
        if (thread.waited && own.clock.knows(thread.slot, thread.waited_at)) {
            own.waited = true;
            own.waited_at = own.clock.at[own.slot]++;
            return;
        }
    for (const Range& weights : state->weights_ready)
        if (!access.write && access.address - weights.start < weights.bytes) return;
    report(access.site, text("%s %s before wait_for_previous_launch: the previous launch may not have finished",
                             access.write ? "writes" : "reads", memory_name(access.address).c_str()));
}

void access_global(const Access& access) {
    check_bounds(access);
    check_waited(access);
    if (!state->unwritten.empty()) check_written(access);
    const uintptr_t end = access.address + access.bytes;
    for (uintptr_t half = access.address / 2; half <= (end - 1) / 2; ++half)
        each_part(global_cell(half), bytes_of(half, access.address, end), state->global_halves, state->global_readers,
                  [&](Cell& cell, uint8_t part, uint32_t byte) {
                      touch(cell, access, part, state->global_readers, 2 * half + byte);
                  });
}

// A thread that returned before a barrier or collective has executed nothing after it. If it has executed what another
// thread now does for the first time after the barrier, it has bypassed the barrier.
void check_bypass(const Access& access) {
    if (!self()->bypass && !self()->warp_bypass) return;
    if (state->visitors.have(access.site, *self())) return;
    for (const Bypass* bypass : {self()->bypass.get(), self()->warp_bypass.get()})
        for (const Thread* other : bypass ? bypass->without : std::vector<Thread*>())
            if (state->visitors.have(access.site, *other))
                report(access.site, text("does after the %s of %s what %s did without it: not all threads %s",
                                         bypass->operation, twin::place(bypass->where).c_str(), name(*other).c_str(),
                                         bypass == self()->bypass.get() ? "of the block arrive at that barrier"
                                                                        : "that it waits for arrive at it"));
}

void set_flight(uint32_t rank, uint32_t offset, uint32_t bytes, Site site) {
    const uint32_t home = home_of(offset);
    for (uint32_t half = home / 2; half < (home + bytes) / 2; ++half)
        each_part(state->shared[rank][half], 3, state->shared_halves, state->shared_readers,
                  [&](Cell& cell, uint8_t, uint32_t) { cell.flight = site; });
}

bool is_own(uintptr_t address) {  // threadIdx and the like, or a thread's stack
    const auto within = [&](const void* start, size_t bytes) {
        return address - reinterpret_cast<uintptr_t>(start) < bytes;
    };
    return within(&here, sizeof here) || within(machine->threads.data(), machine->threads.size() * sizeof(Thread))
           || within(state->launch, sizeof(Launch)) || machine->stacks.holds(address)
           || state->launch->relocation->holds_parameters(address);
}

}  // namespace

std::string memory_name(uintptr_t address) {
    const Range* buffer = buffer_of(address);
    if (!buffer || address - buffer->start >= buffer->bytes) return text("global memory at %#zx", size_t(address));
    return text("byte %zu of buffer %u", size_t(address - buffer->start), buffer->index);
}

std::string near_buffer(uintptr_t address, uint32_t bytes) {
    const Request& request = state->launch->request;
    const Range* buffer = buffer_of(address);
    const uintptr_t end = buffer ? buffer->start + buffer->bytes : 0;
    if (buffer && address + bytes - end <= NEAR_BYTES)
        return text("%zu bytes past the end of buffer %u (%llu bytes)", size_t(std::max(address, end) - end),
                    buffer->index, (unsigned long long)buffer->bytes);
    if (const Range* next = buffer ? buffer + 1 : request.buffers;
        next < request.buffers + request.buffer_count && next->start - address <= NEAR_BYTES)
        return text("%zu bytes before buffer %u", size_t(next->start - address), next->index);
    return text("0x%zx is near none of them", size_t(address));
}

const Touch* written_by(uintptr_t address) {
    const auto page = state->pages.find(address / PAGE_BYTES);
    if (page == state->pages.end()) return nullptr;
    const Cell& cell = (*page->second)[address / 2 % (PAGE_BYTES / 2)];
    const Touch& written = (cell.halves ? cell.halves[address % 2] : cell).written;
    return written.cluster ? &written : nullptr;
}

Site site_of(Where where) {
    auto& wheres = state->wheres;
    for (size_t i = wheres.size(); i-- > 0;)
        if (wheres[i].line == where.line && wheres[i].file == where.file) return IS_WHERE | Site(i);
    wheres.push_back(where);
    return IS_WHERE | Site(wheres.size() - 1);
}

std::string place(Site site) {
    if (site & IS_WHERE) return twin::place(state->wheres[site & ~IS_WHERE]);
    return text("[+%#x]", site);
}

std::string writer_of(uintptr_t address, const Request& request) {
    const Touch* writer = written_by(address);
    if (!writer) return "somewhere";
    const Launch launch(request);  // for its sizes
    state->launch = &launch;
    const std::string writes = place(writer->site) + ": " + name_of(*writer);
    state->launch = nullptr;
    return writes;
}

void report(Site site, const std::string& message) { fail_at(place(site), message); }

void access(const Access& access) {
    for (const Block& block : machine->blocks) {
        const uintptr_t offset = access.address - reinterpret_cast<uintptr_t>(block.arena);
        if (offset >= state->launch->layout.room_bytes) continue;
        check_bypass(access);
        access_shared(block.rank, offset, access);
        if (!access.kind) state->visitors.add(access.site, *self());
        return;
    }
    if (is_own(access.address)) {
        if (machine->follows_registers) registers::touch(access.address, access.bytes, access.site);
        return;
    }
    check_bypass(access);
    access_global(access);
    if (!access.kind) state->visitors.add(access.site, *self());
}

// ------------------------------------------------------------------ visited sites

namespace {

uint64_t key(Site site, const Thread& thread) {  // unique per site and warp
    const uint32_t warps = (machine->launch->block_threads() + 31) / 32;
    return uint64_t(site) << 16 | (thread.owner->rank * warps + thread.number / 32);
}

}  // namespace

void Visitors::add(Site site, const Thread& thread) { lanes[key(site, thread)] |= 1u << thread.number % 32; }

bool Visitors::have(Site site, const Thread& thread) const {
    const auto found = lanes.find(key(site, thread));
    return found != lanes.end() && found->second >> thread.number % 32 & 1;
}

// ------------------------------------------------------------------ used by other files

void begin_launch(const Launch& launch) {
    one_launch.lock();
    kept = std::make_unique<State>();
    kept->launch = &launch;
    kept->moves = launch.relocation->all_moves();
    for (uint32_t i = 0; i < launch.request.unwritten_count; ++i) {
        kept->unwritten.push_back(launch.request.unwritten[i]);
        kept->unwritten.back().start = launch.relocation->moved_to(kept->unwritten.back().start);
    }
    for (uint32_t i = 0; i < launch.request.weights_ready_count; ++i) {
        kept->weights_ready.push_back(launch.request.weights_ready[i]);
        kept->weights_ready.back().start = launch.relocation->moved_to(kept->weights_ready.back().start);
    }
    state = kept.get();
}

void begin_cluster() {
    state->visitors.clear();
    state->shared.resize(machine->blocks.size());
    for (auto& cells : state->shared) cells.assign(state->launch->layout.arena_bytes / 2, {});
    state->shared_halves.clear();
    state->shared_readers.clear();
}

void end_launch() {  // keeps the cells for queries after the launch
    state->launch = nullptr;
    one_launch.unlock();
}

void touch_shared(uint32_t rank, uint32_t offset, uint32_t bytes, bool write, bool asynchronous, Where where,
                  Stamp stamp) {
    if (!here) return;
    access_shared(rank, offset, {0, bytes, write, asynchronous ? ASYNCHRONOUS : uint8_t(0), site_of(where), stamp});
}

void touch_global(const void* address, uint32_t bytes, bool write, Where where, Stamp stamp) {
    if (!here) return;
    const Access access{reinterpret_cast<uintptr_t>(address), bytes, write, 0, site_of(where), stamp};
    access_global(access);
}

void begin_copy(uint32_t rank, uint32_t offset, uint32_t bytes, Where where) {
    touch_shared(rank, offset, bytes, true, false, where);
    set_flight(rank, offset, bytes, site_of(where));
}

void end_copy(uint32_t rank, uint32_t offset, uint32_t bytes) {
    set_flight(rank, offset, bytes, 0);
}

}  // namespace checks

namespace checks {
namespace {

std::pair<uint32_t, uint32_t> own_block() { return {machine->cluster, self()->owner->rank}; }

// Returns what earlier atomics at this address have published, as far as this scope can see it.
Clock seen_at(uintptr_t address, Scope scope) {
    Released& released = state->released[address];
    Clock seen;
    if (const auto found = released.to_block.find(own_block()); found != released.to_block.end()) seen = found->second;
    if (scope == Scope::block) return seen;
    for (auto& [cluster, counts] : released.to_all) {
        Clock one;
        (cluster == machine->cluster ? one.at : one.others[cluster]) = counts;
        seen.join(one);
    }
    return seen;
}

void publish_at(uintptr_t address, Scope scope) {
    Released& released = state->released[address];
    const Thread& thread = *self();
    if (!thread.fenced_in_block.at.empty()) released.to_block[own_block()].join(thread.fenced_in_block);
    if (scope == Scope::block || thread.fenced.at.empty()) return;
    Clock merged;
    merged.at = released.to_all[machine->cluster];
    merged.others = released.to_all;
    merged.join(thread.fenced);
    released.to_all = merged.others;
    released.to_all[machine->cluster] = merged.at;
}

}  // namespace

// On a GPU a volatile access is relaxed with system scope: two of them do not race, and they order nothing else unless
// there is a fence before the write and one after the read. In shared memory, where a barrier is almost always
// intended, it is treated like any other access.
void volatile_access(const Access& access) {
    for (const Block& block : machine->blocks)
        if (access.address - reinterpret_cast<uintptr_t>(block.arena) < state->launch->layout.room_bytes)
            return checks::access(access);
    if (is_own(access.address)) return checks::access(access);
    Access relaxed = access;
    relaxed.kind = ATOMIC;
    checks::access(relaxed);
    if (access.write) publish_at(access.address, Scope::device);
    else self()->observed.join(seen_at(access.address, Scope::device));
}

}  // namespace checks

// A fence followed by an atomic publishes everything before the fence to threads in both scopes; a later atomic at the
// same address acquires it.
void atomic_access(void* pointer, unsigned bytes, Scope scope, Where where) {
    using namespace checks;
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    if (is_counted()) return counting::atomic(address, bytes, where);
    if (!checking()) return;
    access({address, bytes, true, uint8_t(scope == Scope::block ? ATOMIC | IN_BLOCK : ATOMIC), site_of(where)});
    self()->clock.join(seen_at(address, scope));
    publish_at(address, scope);
}

}  // namespace twin
