// mbarriers (arrivals and transaction bytes per phase), the cluster barrier, and distributed shared memory.
#include "counting.h"
#include "units.h"

namespace twin {

u32 own_rank() { return self()->owner->rank; }

u32 cluster_blocks() { return u32(machine->blocks.size()); }

namespace {

constexpr u32 MOST_COUNTED = (1 << 20) - 1;  // limit of both counters: arrivals and bytes

u64 mark(u32 barrier) { return 0x6D62617272696572ull ^ barrier; }  // contents of a barrier's eight bytes

std::string mbarrier_state(const Waiting& waiting) {
    auto& barrier = *static_cast<const Mbarrier*>(waiting.object);
    return text("parity %u: %u phases completed, %u of %u arrivals and %lld bytes missing", waiting.detail,
                barrier.phase, barrier.pending, barrier.expected, barrier.bytes);
}

}  // namespace

Mbarrier& barrier_at(u32 barrier, u32 rank, const char* what, Where where) {
    if (rank >= machine->blocks.size())
        fail(where, "%s in block %u of a cluster of %zu", what, rank, machine->blocks.size());
    auto& barriers = units_state().blocks[rank].barriers;
    const auto found = barriers.find(barrier);
    if (found == barriers.end()) fail(where, "%s on shared %#x, where no mbarrier was initialized", what, barrier);
    u64 bytes;
    std::memcpy(&bytes, machine->blocks[rank].arena + barrier, 8);
    if (bytes != mark(barrier))
        fail(where, "%s on the mbarrier at shared %#x, whose bytes were overwritten", what, barrier);
    return found->second;
}

namespace {

// Returns true if the running thread has waited for that phase of the cluster barrier, or knows of a thread that has.
bool knows_cluster_phase(int phase) {
    if (self()->cluster_seen >= phase) return true;
    for (const Thread& thread : machine->threads)
        if (thread.owner == self()->owner && thread.cluster_seen >= phase
            && self()->clock.knows(thread.slot, thread.cluster_seen_at)) return true;
    return false;
}

bool knows_started(u32 rank) {
    if (knows_cluster_phase(1)) return true;
    const unsigned per_block = machine->launch->block_threads();
    for (unsigned slot = rank * per_block; slot < (rank + 1) * per_block; ++slot)
        if (self()->clock.knows(slot, 1)) return true;
    return false;
}

}  // namespace

void check_present(u32 rank, const char* what, Where where) {
    if (rank >= machine->blocks.size())
        fail(where, "%s in block %u of a cluster of %zu", what, rank, machine->blocks.size());
    if (rank == own_rank()) return;
    if (units_state().blocks[rank].exited == machine->launch->block_threads())
        fail(where, "%s in block %u of the cluster, all of whose threads have returned", what, rank);
    if (!checking() || self()->met >> rank & 1) return;
    if (!knows_started(rank))
        fail(where, "%s in block %u of the cluster, which need not have started: no barrier of the cluster before it", what,
             rank);
    self()->met |= 1u << rank;
}

void visit(u32 rank, Stamp stamp, Where where) {
    if (!checking() || (rank == own_rank() && !stamp.agent)) return;
    const u32 slot = stamp.agent ? stamp.agent : self()->slot;
    units_state().blocks[rank].visits[slot] = {stamp.agent ? stamp.count : self()->clock.at[slot], where};
}

void check_initialized(const Mbarrier& barrier, u32 address, u32 rank, bool asynchronous, const char* what, Where where) {
    if (!checking()) return;
    const bool own = barrier.initializer == self()->slot;
    const bool shown = barrier.shown && knows_cluster_phase(int(barrier.shown));
    const std::string begun = place(barrier.where);
    if (!own && !shown && !self()->clock.knows(barrier.initializer, barrier.initialized))
        fail(where, "%s on the mbarrier at shared %#x%s, and nothing orders it after the barrier's initialization at %s",
             what, address, rank == own_rank() ? "" : " of another block", begun.c_str());
    if (!asynchronous || knows_proxy_fence(barrier.initializer, barrier.initialized)) return;
    if (!barrier.fenced || !(own || shown || self()->clock.knows(barrier.initializer, barrier.fenced)))
        fail(where, "%s on the mbarrier at shared %#x, which was initialized at %s with no fence.mbarrier_init or "
             "fence.proxy.async since", what, address, begun.c_str());
}

void fence_mbarrier_init() {
    if (!checking()) return;
    const u32 count = self()->clock.at[self()->slot]++;
    for (auto& [address, barrier] : units_state().blocks[own_rank()].barriers)
        if (barrier.initializer == self()->slot && !barrier.fenced) barrier.fenced = count;
}

// The stamp of the barrier's current phase, known to every thread that has waited for it.
Stamp arrival_stamp(Mbarrier& barrier) { return {uint16_t(agent_at(barrier.agent)), barrier.phase + 1}; }

void complete_if_done(Mbarrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    ++barrier.phase;
    barrier.pending = barrier.expected;
    if (barrier.agent) barrier.arriving.raise(barrier.agent, barrier.phase);
    barrier.completed = barrier.arriving;
    wake(barrier.sleepers, barrier.completed);
}

void mbarrier_init(u32 barrier, u32 arrivals, Where where) {
    use_shared(own_rank(), barrier, 8, true, true, "mbarrier.init", where);
    if (barrier % 8) fail(where, "an mbarrier at shared %#x, which is no multiple of 8", barrier);
    if (!arrivals || arrivals > MOST_COUNTED)
        fail(where, "an mbarrier for %u arrivals; it counts 1 to %u", arrivals, MOST_COUNTED);
    auto& barriers = units_state().blocks[own_rank()].barriers;
    if (const auto found = barriers.find(barrier); found != barriers.end())
        fail(where, "mbarrier.init on shared %#x, where an mbarrier is in use since %s", barrier,
             place(found->second.where).c_str());
    Mbarrier fresh;
    fresh.expected = fresh.pending = arrivals;
    fresh.where = where;
    fresh.initializer = self()->slot;
    fresh.initialized = checking() ? self()->clock.at[self()->slot] : 0;
    barriers[barrier] = fresh;
    const u64 bytes = mark(barrier);
    std::memcpy(self()->owner->arena + barrier, &bytes, 8);
}

void mbarrier_arrive(u32 barrier, u32 rank, u32 bytes, Where where) {
    check_present(rank, "an arrival", where);
    visit(rank, {}, where);
    Mbarrier& b = barrier_at(barrier, rank, "an arrival", where);
    check_initialized(b, barrier, rank, false, "an arrival", where);
    if (bytes > MOST_COUNTED)
        fail(where, "%u bytes expected at the mbarrier at shared %#x, which counts up to %u", bytes, barrier, MOST_COUNTED);
    if (!b.pending)
        fail(where, "more arrivals at mbarrier %#x than the %u it was initialized for", barrier, b.expected);
    release(b.arriving);
    b.bytes += bytes;
    --b.pending;
    complete_if_done(b);
}

bool wait::mbarrier(u32 barrier, u32 parity, Where where) {
    Mbarrier* b = &barrier_at(barrier, own_rank(), "a wait", where);
    check_initialized(*b, barrier, own_rank(), false, "a wait", where);
    while ((b->phase & 1) == parity) {
        sleep(b->sleepers, {"an mbarrier", where, b, parity, mbarrier_state});
        b = &barrier_at(barrier, own_rank(), "a wait", where);
    }
    acquire(b->completed);
    return true;
}

// ------------------------------------------------------------------ the cluster

namespace {

std::string cluster_state(const Waiting&) {
    return text("%d of %zu threads have arrived, %d have returned", units_state().cluster.arrived,
                machine->launch->cluster_blocks() * size_t(machine->launch->block_threads()), units_state().exited);
}

void open_cluster_if_all() {
    Gathering& cluster = units_state().cluster;
    const int all = int(machine->launch->cluster_blocks() * machine->launch->block_threads());
    if (!cluster.arrived || cluster.arrived + units_state().exited < all) return;
    units_state().exited += units_state().exited_arrived;
    cluster.arrived = units_state().exited_arrived = 0;
    ++cluster.result;  // phases completed
    cluster.completed = cluster.clock;
    wake(cluster.sleepers, cluster.completed);
    cluster.clock = {};
}

}  // namespace

void wait::cluster_arrive(bool orders, Where) {
    Gathering& cluster = units_state().cluster;
    if (orders) release(cluster.clock);
    for (auto& [address, barrier] : units_state().blocks[own_rank()].barriers)
        if (barrier.fenced && !barrier.shown && barrier.initializer == self()->slot) barrier.shown = cluster.result + 1;
    ++cluster.arrived;
    self()->cluster_phase = cluster.result + 1;
    open_cluster_if_all();
}

// Returned threads count as arrived; one that had already arrived is not counted twice.
void leave_cluster(const Thread& thread) {
    auto& state = units_state();
    ++(thread.cluster_phase > state.cluster.result ? state.exited_arrived : state.exited);
    open_cluster_if_all();
}

void wait::cluster_wait(Where where) {
    Gathering& cluster = units_state().cluster;
    while (self()->cluster_phase > cluster.result)
        sleep(cluster.sleepers, {"the cluster's barrier", where, nullptr, 0, cluster_state});
    acquire(cluster.completed);
    if (!checking()) return;
    self()->cluster_seen = self()->cluster_phase;
    self()->cluster_seen_at = self()->clock.at[self()->slot]++;
}

unsigned char* shared_bytes(u32 address, u32 rank, u32 bytes, bool write, Where where) {
    check_present(rank, write ? "st.shared" : "ld.shared", where);
    visit(rank, {}, where);
    if (address % bytes) fail(where, "%u bytes at shared %#x, which is no multiple of %u", bytes, address, bytes);
    use_shared(rank, address, bytes, write, false, write ? "st.shared" : "ld.shared", where);
    return machine->blocks[rank].arena + address;
}

// ------------------------------------------------------------------ st.async: at once, or late, when no thread can run

// A thread that sees the barrier complete has seen the pushed bytes, but nothing else that the issuer knew.
void perform(u32 destination, u32 rank, const Push& push) {
    Mbarrier& barrier = barrier_at(push.barrier, rank, "the completion of st.async", push.where);
    std::memcpy(machine->blocks[rank].arena + destination, &push.value, 16);
    barrier.bytes -= 16;
    complete_if_done(barrier);
}

void push(u32 address, u32 barrier, u32 rank, float4 value, Where where) {
    check_present(rank, "st.async", where);
    Mbarrier& counted = barrier_at(barrier, rank, "st.async", where);
    check_initialized(counted, barrier, rank, false, "st.async", where);
    const Stamp stamp = arrival_stamp(counted);
    visit(rank, stamp, where);
    if (address % 16) fail(where, "st.async to shared %#x, which is no multiple of 16", address);
    use_shared(rank, address, 16, true, false, "st.async", where, stamp);
    if (is_counted()) counting::push(16, where);
    const Push push{value, barrier, where, self()};
    if (!settings().late) return perform(address, rank, push);
    std::memset(machine->blocks[rank].arena + address, POISON, 16);
    units_state().blocks[rank].pushes.emplace(address, push);
}

}  // namespace twin
