// Block barriers and warp collectives.
#include "counting.h"
#include "state.h"

namespace twin {

void Clock::join(const Clock& other) {
    if (at.size() < other.at.size()) at.resize(other.at.size());
    for (size_t i = 0; i < other.at.size(); ++i) at[i] = at[i] < other.at[i] ? other.at[i] : at[i];
    for (auto& [cluster, counts] : other.others) {
        auto& mine = others[cluster];
        if (mine.size() < counts.size()) mine.resize(counts.size());
        for (size_t i = 0; i < counts.size(); ++i) mine[i] = mine[i] < counts[i] ? counts[i] : mine[i];
    }
}

void Clock::raise(uint32_t slot, uint32_t count) {
    if (at.size() <= slot) at.resize(slot + 1);
    at[slot] = std::max(at[slot], count);
}

void release(Clock& clock) {
    if (!here || !checking()) return;
    clock.join(self()->clock);
    ++self()->clock.at[self()->slot];
}

void acquire(const Clock& clock) {
    if (here && checking()) self()->clock.join(clock);
}

bool knows_proxy_fence(uint32_t slot, uint32_t count) {
    if (slot >= machine->threads.size()) return true;
    const auto& fences = machine->threads[slot].proxy_fences;
    const auto next = std::lower_bound(fences.begin(), fences.end(), count);
    return next != fences.end() && (slot == self()->slot || self()->clock.knows(slot, *next));
}

unsigned lane() { return self()->number % 32; }

unsigned warp_lanes() {
    const unsigned left = machine->launch->block_threads() - self()->number / 32 * 32;
    return left >= 32 ? ~0u : (1u << left) - 1;
}

void fence(Scope scope) {
    if (!checking()) return;
    Thread& thread = *self();
    thread.clock.join(thread.observed);
    thread.fenced_in_block = thread.clock;
    if (scope == Scope::device) thread.fenced = thread.clock;
    ++thread.clock.at[thread.slot];
}

void wait_for_launch_in_front() {
    if (!checking()) return;
    machine->launch->waited = self()->waited = true;
    self()->waited_at = self()->clock.at[self()->slot]++;
}

namespace {

std::string gathering_state(const Waiting& waiting) {
    auto& barrier = *static_cast<const Gathering*>(waiting.object);
    int come = barrier.whole ? barrier.arrived : 0;
    for (const auto& warp : barrier.warps) come += __builtin_popcount(warp.lanes);
    const char* parts = come > barrier.arrived ? ", of some warps not all" : "";
    return text("%d of %d threads have arrived%s", come, barrier.expected, parts);
}

std::string meeting_state(const Waiting& waiting) {
    auto& meeting = *static_cast<const Meeting*>(waiting.object);
    return text("lanes %08x of mask %08x have arrived", meeting.arrived, waiting.detail);
}

bool same(Where a, Where b) { return a.line == b.line && a.file == b.file; }

// Walks frame pointers, which the kernel and the runtime are compiled with.
__attribute__((noinline)) Path own_path() {
    if (!checking()) return 0;
    Path path = 14695981039346656037ull;  // FNV-1a, by whole addresses
    self()->calls.clear();
    const auto low = reinterpret_cast<uintptr_t>(self()->stack);
    auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
    while (frame % 8 == 0 && frame - low < STACK_BYTES - 16) {
        const auto* words = reinterpret_cast<const uintptr_t*>(frame);
        path = (path ^ words[1]) * 1099511628211ull;
        if (words[1] - settings().library.start < settings().library.bytes) self()->calls.push_back(words[1]);
        if (words[0] <= frame) break;
        frame = words[0];
    }
    return path;
}

// Returns true if the running thread reached a call of the same line by another call path. g++ may have duplicated the
// code, so launch.py compares the source lines of both paths and relaunches if they are equal.
bool by_other_calls(Path path) { return settings().paths && path != self()->path; }

std::string ways(const std::vector<uintptr_t>& calls) {
    std::string text = " {";
    for (const auto* path : {&calls, static_cast<const std::vector<uintptr_t>*>(&self()->calls)}) {
        for (const uintptr_t call : *path) text += twin::text("[+%#zx] ", size_t(call - 1 - settings().library.start));
        text += path == &calls ? "| " : "}";
    }
    return text;
}

Thread& lane_of_warp(unsigned lane) { return machine->threads[self()->slot - self()->number % 32 + lane]; }

std::string times(uint32_t count) { return count == 1 ? "once" : text("%u times", count); }

bool has_come(const Thread& thread, Where barrier) {
    return std::any_of(thread.barriers.begin(), thread.barriers.end(), [&](Where w) { return same(w, barrier); });
}

// A named barrier counts any arrivals. Counting the intended threads requires an order between its rounds: an arriving
// thread must know that the previous round is complete.
void check_round(Gathering& barrier, int id, bool waits, Where where) {
    const unsigned threads = machine->launch->block_threads(), number = self()->number;
    barrier.visitors.resize(threads);
    Gathering::Visitor& own = barrier.visitors[number];
    if (own.came == barrier.round)
        fail(where, "arrives at barrier %d a second time, before it has opened", id);
    const uint32_t before = barrier.round - 1;
    const unsigned first = self()->slot - number;
    for (unsigned other = 0; before && own.waited != before && other < threads; ++other)
        if (barrier.visitors[other].came == before && other != number
            && !self()->clock.knows(first + other, barrier.visitors[other].count))
            fail(where, "barrier %d, at which thread %u was in the round before, and nothing orders the two: more than "
                 "the %d threads that it counts arrive at it, or several groups share it", id, other, barrier.expected);
    own = {barrier.round, waits ? barrier.round : own.waited, self()->clock.at[self()->slot]};
}

// A named barrier counts whole warps: a warp has arrived once all of its launched lanes have.
void arrive_in_warp(Gathering& barrier, int id, Where where) {
    barrier.warps.resize(self()->owner->warps.size());
    Gathering::WarpArrival& arrival = barrier.warps[self()->number / 32];
    if (arrival.lanes) {
        const bool apart = !same(arrival.where, where), other_way = !apart && by_other_calls(arrival.path);
        if (apart || other_way)
            fail_at(place(where), text("barrier %d, while lanes %08x of the warp are in the call at %s: it counts whole "
                                       "warps, whose lanes arrive at it together", id, arrival.lanes,
                                       place(arrival.where).c_str()) + (other_way ? ways(arrival.calls) : ""));
    }
    if (!arrival.lanes) arrival.path = self()->path, arrival.calls = self()->calls;
    arrival.lanes |= 1u << lane();
    arrival.where = where;
    if (arrival.lanes == warp_lanes()) barrier.arrived += 32;
}

Gathering& arrive(int id, int threads, bool waits, Where where) {
    if (faults::stack_nearly_full()) fail(where, "%s", faults::overflow_text().c_str());
    if (id < 0 || id > 15) fail(where, "barrier %d; a block has 0 to 15", id);
    Gathering& barrier = self()->owner->barriers[id];
    const int present = int(machine->launch->block_threads()), expected = threads ? threads : present;
    if (threads % 32 || threads < 0 || threads > (present + 31) / 32 * 32)
        fail(where, "barrier %d for %d threads; it counts whole warps of 32, and the block has %d threads", id, threads,
             present);
    if ((barrier.arrived || !barrier.warps.empty()) && barrier.expected != expected)
        fail(where, "barrier %d is used with %d and with %d threads", id, barrier.expected, expected);
    // bar.sync may be called from different places; __syncthreads requires that all threads call the same one.
    if (!id && !threads && barrier.arrived && !same(barrier.where, where))
        fail(where, "__syncthreads, while %d other threads of the block wait in the one at %s", barrier.arrived,
             place(barrier.where).c_str());
    barrier.expected = expected;
    barrier.whole = !threads;
    barrier.where = where;
    self()->path = own_path();
    if (barrier.whole && checking()) {
        if (!has_come(*self(), where)) self()->barriers.push_back(where);
        auto& visits = self()->owner->visits[self()->path];
        visits.resize(present);
        ++visits[self()->number];
    }
    if (checking() && threads) check_round(barrier, id, waits, where);
    release(barrier.clock);
    if (is_counted()) counting::barrier(where);
    if (barrier.whole) ++barrier.arrived;
    else arrive_in_warp(barrier, id, where);
    return barrier;
}

// Since Volta a returned thread counts as arrived at its block's barrier.
bool all_came(const Gathering& barrier, const Block& block) {
    return barrier.arrived + (barrier.whole ? block.returned : 0) >= barrier.expected;
}

// Returned threads may have exited before the barrier or bypassed it. What the others do next tells these apart: see
// checks::check_bypass.
void remember_bypass(const Gathering& barrier, const Block& block) {
    auto bypass = std::make_shared<Bypass>(Bypass{"__syncthreads", barrier.where, {}});
    for (Thread& thread : machine->threads)
        if (thread.owner == &block && thread.done && !has_come(thread, barrier.where))
            bypass->without.push_back(&thread);
    if (bypass->without.empty()) return;
    for (Thread* thread : barrier.sleepers) thread->bypass = bypass;
    self()->bypass = bypass;
}

// A thread that arrived at the barrier earlier and has returned since left the loop around it too early.
void check_trips(const Gathering& barrier, const Block& block) {
    const auto check = [&](const Thread& comer) {
        const auto& visits = block.visits.at(comer.path);
        for (const Thread& other : machine->threads)
            if (other.owner == &block && other.done && visits[other.number] && visits[other.number] < visits[comer.number])
                fail_at(place(barrier.where), text("arrives at this __syncthreads %s, and %s, which has returned, %s: not all "
                                                   "threads of the block make the same number of trips",
                                                   times(visits[comer.number]).c_str(), name(other).c_str(),
                                                   times(visits[other.number]).c_str()), &comer);
    };
    Path last = 0;
    if (!self()->done) check(*self()), last = self()->path;
    for (const Thread* comer : barrier.sleepers)
        if (comer->path != last) check(*comer), last = comer->path;
}

// Called when a named barrier opens. Later warps are ordered after that, so only counted warps may be in it.
void check_warps(const Gathering& barrier) {
    int come = 0;
    for (unsigned warp = 0; warp < barrier.warps.size(); ++warp) {
        const Gathering::WarpArrival& arrival = barrier.warps[warp];
        come += arrival.lanes ? 32 : 0;
        if (come > barrier.expected)
            fail(barrier.where, "a named barrier that counts %d threads opens while lanes %08x of warp %u are in it at %s: "
                 "more threads arrive at it than it counts", barrier.expected, arrival.lanes, warp,
                 place(arrival.where).c_str());
    }
}

void open(Gathering& barrier, const Block& block) {
    if (barrier.whole && block.returned && checking()) {
        check_trips(barrier, block);
        remember_bypass(barrier, block);
    }
    if (!barrier.whole) check_warps(barrier);
    if (barrier.whole && is_counted()) counting::end_warps(block);
    barrier.result = barrier.votes;
    barrier.came = barrier.arrived;
    barrier.arrived = barrier.votes = 0;
    barrier.warps.clear();
    ++barrier.round;
    if (barrier.whole) barrier.clock.join(block.returned_clock);
    acquire(barrier.clock);
    wake(barrier.sleepers, barrier.clock);
    barrier.clock = {};
}

}  // namespace

int wait::block_barrier(int id, int threads, bool predicate, Vote vote, Where where) {
    Gathering& barrier = arrive(id, threads, true, where);
    barrier.votes += predicate;
    if (all_came(barrier, *self()->owner))
        open(barrier, *self()->owner);
    else
        sleep(barrier.sleepers, {id ? "a named barrier" : "__syncthreads", where, &barrier, 0, gathering_state});
    if (vote == Vote::count) return barrier.result;
    return vote == Vote::all ? barrier.result == barrier.came : barrier.result > 0;
}

void wait::block_arrive(int id, int threads, Where where) {
    Gathering& barrier = arrive(id, threads, false, where);
    if (all_came(barrier, *self()->owner)) open(barrier, *self()->owner);
}

namespace {

// Checks the returned lanes that a collective does not wait for. One that participated before has left a loop too
// early, or used another mask. For one that never participated, later accesses decide: see checks::check_bypass.
void check_absent(Meeting& meeting, unsigned mask, unsigned returned) {
    const unsigned first_slot = self()->slot - self()->number % 32;
    auto& by_path = self()->owner->warps[self()->number / 32].visits;
    const int comer = __builtin_ctz(meeting.arrived);
    const Path path = machine->threads[first_slot + comer].path;  // equals the others', unless g++ duplicated the call
    Visits& visits = by_path[path];
    for (int lane = 0; lane < 32; ++lane) {
        if (!(meeting.arrived >> lane & 1)) continue;
        const Path own = machine->threads[first_slot + lane].path;
        Visits& lanes = own == path ? visits : by_path[own];
        ++lanes.count[lane], lanes.mask[lane] = mask;
    }
    if (!(mask & returned)) return;
    auto bypass = std::make_shared<Bypass>(Bypass{meeting.operation, meeting.where, {}});
    for (int lane = 0; lane < 32; ++lane) {
        if (!(mask & returned & 1u << lane)) continue;
        Thread& other = machine->threads[first_slot + lane];
        if (!visits.count[lane]) {
            bypass->without.push_back(&other);
        } else if (visits.mask[lane] != mask) {
            fail_at(place(meeting.where), text("%s with mask %08x, where %s arrived with mask %08x", meeting.operation, mask,
                                               name(other).c_str(), visits.mask[lane]),
                    &machine->threads[first_slot + comer]);
        } else if (visits.count[lane] < visits.count[comer]) {
            fail_at(place(meeting.where), text("arrives at this %s %s, and %s, which its mask %08x names and which has "
                                               "returned, %s", meeting.operation, times(visits.count[comer]).c_str(),
                                               name(other).c_str(), mask, times(visits.count[lane]).c_str()),
                    &machine->threads[first_slot + comer]);
        }
    }
    if (bypass->without.empty()) return;
    for (int lane = 0; lane < 32; ++lane)
        if (meeting.arrived >> lane & 1) machine->threads[first_slot + lane].warp_bypass = bypass;
}

// Returned lanes are not waited for; operations that need them report it themselves.
void meet_if_all_came(Meeting& meeting, unsigned mask, unsigned returned) {
    if (!meeting.arrived || meeting.arrived != (mask & ~returned)) return;
    if (checking()) check_absent(meeting, mask, returned);
    if (meeting.perform) meeting.perform(meeting.payloads, meeting.arrived, meeting.where);
    if (is_counted() && !std::strncmp(meeting.operation, "__shfl", 6)) counting::shuffle();
    meeting.arrived = 0;
    acquire(meeting.clock);
    wake(meeting.sleepers, meeting.clock);
    meeting.clock = {};
}

void meet(unsigned mask, void* payload, wait::Perform perform, const char* operation, bool orders, Where where) {
    if (faults::stack_nearly_full()) fail(where, "%s", faults::overflow_text().c_str());
    const unsigned me = 1u << lane(), whole = warp_lanes();
    mask &= whole;
    if (!(mask & me)) fail(where, "%s with mask %08x, which does not name the caller", operation, mask);
    Warp& warp = self()->owner->warps[self()->number / 32];
    Meeting& meeting = mask == whole ? warp.whole : warp.partial[mask];
    self()->path = own_path();
    if (meeting.arrived) {
        const Thread& first = lane_of_warp(__builtin_ctz(meeting.arrived));
        const bool apart = std::strcmp(meeting.operation, operation) || !same(meeting.where, where);
        const bool other_way = !apart && by_other_calls(first.path);
        if (apart || other_way)
            fail_at(place(where), text("%s, while lanes %08x of the warp wait in %s at %s: all lanes that a mask names arrive "
                                       "at one call", operation, meeting.arrived, meeting.operation,
                                       place(meeting.where).c_str()) + (other_way ? ways(first.calls) : ""));
    }
    meeting.operation = operation;
    meeting.where = where;
    meeting.perform = perform;
    meeting.payloads[lane()] = payload;
    meeting.arrived |= me;
    if (orders) release(meeting.clock);
    meet_if_all_came(meeting, mask, warp.returned);
    if (meeting.arrived) sleep(meeting.sleepers, {operation, where, &meeting, mask, meeting_state});
}

}  // namespace

void wait::collective(unsigned mask, void* payload, Perform perform, const char* operation, Where where) {
    meet(mask, payload, perform, operation, false, where);
}

void wait::warp_barrier(unsigned mask, const char* operation, Where where) {
    meet(mask, nullptr, nullptr, operation, true, where);
}

namespace {

struct Voter {
    bool predicate;
    unsigned votes;
};

void count_votes(void* const* lanes, unsigned mask, Where) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) votes |= unsigned(static_cast<Voter*>(lanes[lane])->predicate) << lane;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) static_cast<Voter*>(lanes[lane])->votes = votes;
}

}  // namespace

unsigned wait::ballot(unsigned mask, bool predicate, const char* operation, Where where) {
    Voter mine{predicate, 0};
    collective(mask, &mine, count_votes, operation, where);
    return mine.votes;
}

// Everything a thread did before it returned is ordered before a later opening of a block barrier, which waited for it.
void leave_block(Thread& thread) {
    Block& block = *thread.owner;
    ++block.returned;
    if (checking()) block.returned_clock.join(thread.clock);
    Warp& warp = block.warps[thread.number / 32];
    warp.returned |= 1u << thread.number % 32;
    for (Gathering& barrier : block.barriers)
        if (barrier.arrived && all_came(barrier, block)) open(barrier, block);
    meet_if_all_came(warp.whole, warp_lanes(), warp.returned);
    for (auto& [mask, meeting] : warp.partial) meet_if_all_came(meeting, mask, warp.returned);
}

}  // namespace twin
