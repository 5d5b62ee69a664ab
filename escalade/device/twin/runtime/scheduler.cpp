// Each OS thread runs one cluster at a time. Its CUDA threads are fibers that run until they wait.
#include "counting.h"
#include "relocation.h"
#include "state.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

namespace twin {

thread_local const Place* here;
thread_local Machine* machine;

namespace {

// AddressSanitizer, if the process has it, also checks the gaps of shared memory.
extern "C" void __asan_poison_memory_region(const volatile void* start, size_t bytes) __attribute__((weak));
extern "C" void __asan_unpoison_memory_region(const volatile void* start, size_t bytes) __attribute__((weak));

struct Failure {};  // thrown by fail() if no CUDA thread is running

Thread* pick() {
    auto& ready = machine->ready;
    if (ready.empty()) return nullptr;
    if (settings().seed) std::swap(ready.front(), ready[random_below(ready.size())]);
    Thread* thread = ready.front();
    ready.pop_front();
    return thread;
}

// Switches to the next thread, or to the scheduler if there is none or the run is over.
void hand_over() {
    Thread* const from = self();
    if (machine->watch.asked_to_stop && !from->done) fail_at(place(from->waiting.where), faults::stop_text());
    Thread* const next = machine->error.empty() ? pick() : nullptr;
    if (next == from) return;
    here = next;
    switch_fiber(*from, next ? static_cast<Fiber&>(*next) : machine->scheduler);
}

void run_thread() {
    fiber_started();
    settings().entry(settings().parameters);
    checks::check_stray();
    units::exit_thread(*self());
    self()->done = true;
    machine->watch.returned = machine->watch.returned + 1;
    leave_block(*self());
    hand_over();
    __builtin_unreachable();
}

void set_place(Thread& thread, Block& block, unsigned number) {
    const dim3& size = machine->launch->sizes.block;
    thread.thread = {number % size.x, number / size.x % size.y, number / (size.x * size.y)};
    thread.number = number;
    thread.slot = block.rank * machine->launch->block_threads() + number;
}

// For kernels that never wait: runs the threads of a block one after another, on one stack.
void run_block_in_turn() {
    fiber_started();
    Thread& thread = *self();
    std::vector<uint32_t> order(machine->launch->block_threads());
    for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    if (settings().seed) std::shuffle(order.begin(), order.end(), machine->generator);
    const Request& request = settings();
    uint32_t done = 0;
    for (uint32_t number : order) {
        set_place(thread, *thread.owner, number);
        if (request.checks) thread.clock.at.assign(thread.clock.at.size(), 0), thread.clock.at[thread.slot] = 1;
        thread.waited = false;
        request.entry(request.parameters);
        checks::check_stray();
        machine->watch.returned = machine->watch.returned + 1;
        units::exit_thread(thread);
        // In sequential order, a warp is complete after its last lane.
        if (request.counts && !request.seed && (++done % 32 == 0)) counting::end_warp(*thread.owner, done / 32 - 1);
    }
    thread.done = true;
    hand_over();
    __builtin_unreachable();
}

// ------------------------------------------------------------------ one cluster

void prepare_block(Block& block, unsigned rank, uint3 first) {
    Launch& launch = *machine->launch;
    const uint3& cluster = launch.sizes.cluster;
    block = Block();
    block.index = {first.x + rank % cluster.x, first.y + rank / cluster.x % cluster.y,
                   first.z + rank / (cluster.x * cluster.y)};
    block.rank = rank;
    block.arena = machine->arenas[rank];
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(block.arena, launch.layout.arena_bytes);
    std::memset(block.arena, POISON, launch.layout.arena_bytes);
    if (__asan_poison_memory_region) {
        __asan_poison_memory_region(block.arena, launch.layout.arena_bytes);
        for (const Variable& part : launch.layout.parts)
            __asan_unpoison_memory_region(block.arena + part.offset, part.bytes);
    }
    block.warps.resize((launch.block_threads() + 31) / 32);
}

void prepare_thread(Thread& thread, Block& block, unsigned number, char* stack) {
    const Launch& launch = *machine->launch;
    thread = Thread();
    set_place(thread, block, number);
    thread.block = block.index;
    thread.sizes = &launch.sizes;
    thread.static_shared = block.arena + launch.layout.static_start;
    thread.dynamic_shared = block.arena + launch.layout.dynamic_start;
    thread.owner = &block;
    if (launch.request.checks) {
        thread.clock.at.assign(launch.cluster_blocks() * launch.block_threads(), 0);
        thread.clock.at[thread.slot] = 1;
    }
    thread.stack = stack;
    prepare(thread, launch.request.fibers ? run_thread : run_block_in_turn);
    machine->ready.push_back(&thread);
}

void prepare_cluster(uint3 first) {
    Launch& launch = *machine->launch;
    const unsigned per_block = launch.request.fibers ? launch.block_threads() : 1;
    machine->blocks.resize(launch.cluster_blocks());
    machine->threads.resize(machine->blocks.size() * per_block);
    machine->ready.clear();
    machine->parts.clear();
    if (machine->arena_bytes < launch.layout.room_bytes) {
        for (unsigned char* arena : machine->arenas) std::free(arena);
        machine->arenas.clear();
        machine->arena_bytes = launch.layout.room_bytes;
    }
    while (machine->arenas.size() < machine->blocks.size())
        machine->arenas.push_back(static_cast<unsigned char*>(std::aligned_alloc(4096, machine->arena_bytes)));
    size_t slot = 0;
    for (unsigned rank = 0; rank < machine->blocks.size(); ++rank) {
        prepare_block(machine->blocks[rank], rank, first);
        for (unsigned number = 0; number < per_block; ++number, ++slot)
            prepare_thread(machine->threads[slot], machine->blocks[rank], number, machine->stacks.at(slot));
    }
    units::begin_cluster();
    if (launch.request.checks) checks::begin_cluster();
    if (launch.request.counts) counting::begin_cluster();
}

void check_guards(const Block& block) {
    const SharedLayout& layout = machine->launch->layout;
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(block.arena, layout.arena_bytes);
    auto check = [&](uint32_t from, uint32_t to) {
        for (uint32_t offset = from; offset < to && machine->error.empty(); ++offset)
            if (block.arena[offset] != POISON)
                machine->error = name(block.index) + " wrote outside its shared memory: " + layout.describe(offset);
    };
    uint32_t end = 0;
    for (const Variable& part : layout.parts) {
        check(end, part.offset);
        end = part.offset + part.bytes;
    }
    check(end, layout.arena_bytes);
    for (const Part& part : machine->parts) {
        if (part.to == part.from) continue;
        check(part.to - GUARD_BYTES, part.to);
        check(part.to + part.bytes, part.to + part.bytes + GUARD_BYTES);
    }
}

void run_cluster(uint3 first) {
    prepare_cluster(first);
    std::string& error = machine->error;
    while (error.empty()) {
        if (machine->watch.asked_to_stop) {
            error = faults::stop_text();
            break;
        }
        Thread* next = pick();
        if (!next && !units::idle()) break;
        if (!next) continue;
        here = next;
        switch_fiber(machine->scheduler, *next);
    }
    here = nullptr;
    const auto waits = [](const Thread& thread) { return !thread.done; };
    if (error.empty() && std::any_of(machine->threads.begin(), machine->threads.end(), waits))
        error = "deadlock: nothing can run." + thread_states();
    if (error.empty()) units::end_cluster();
    if (error.empty() && is_counted())
        for (const Block& block : machine->blocks) counting::end_warps(block);
    for (const Block& block : machine->blocks) check_guards(block);
}

// A fault in the runtime itself, caused by a bad address from the kernel, ends the cluster here.
void run_guarded(uint3 first) {
    faults::Watch& watch = machine->watch;
    watch.guarded = true;
    try {
        if (!sigsetjmp(watch.rescue, 0)) run_cluster(first);
    } catch (Failure) {
    }
    watch.guarded = false;
}

// ------------------------------------------------------------------ one launch

// Machines are pooled to reuse their stacks and arenas.
std::mutex pool_mutex;
std::vector<std::unique_ptr<Machine>> pool;

std::unique_ptr<Machine> take_machine() {
    std::lock_guard lock(pool_mutex);
    if (pool.empty()) return std::make_unique<Machine>();
    auto taken = std::move(pool.back());
    pool.pop_back();
    return taken;
}

void work(Launch& launch) {
    std::unique_ptr<Machine> own = take_machine();
    machine = own.get();
    machine->launch = &launch;
    machine->error.clear();
    const bool ticking = launch.request.limit_ms || launch.request.interruptible;
    std::optional<faults::Watching> watching(std::in_place, machine->watch, ticking);
    machine->follows_registers = false;
    if (launch.request.checks) machine->stacks.forget_touches();
    const dim3& grid = launch.sizes.grid;
    const uint3& cluster = launch.sizes.cluster;
    const uint32_t across = grid.x / cluster.x, down = grid.y / cluster.y;
    while (!launch.failed) {
        const size_t position = launch.next++;
        if (position >= launch.order.size()) break;
        const uint32_t number = launch.order[position];
        machine->cluster = number + 1;
        machine->generator.seed(launch.request.seed + 7919u * number);
        run_guarded({number % across * cluster.x, number / across % down * cluster.y,
                     number / (across * down) * cluster.z});
        if (machine->error.empty()) continue;
        std::lock_guard lock(launch.mutex);
        if (!launch.failed.exchange(true)) launch.error = machine->error;
    }
    watching.reset();
    machine = nullptr;
    std::lock_guard lock(pool_mutex);
    pool.push_back(std::move(own));
}

std::string mistake_in(const Launch& launch) {
    const Request& r = launch.request;
    for (int d = 0; d < 3; ++d)
        if (!r.cluster[d] || !r.block[d] || r.grid[d] % r.cluster[d])
            return text("the grid of %u blocks along dimension %d is no whole number of clusters of %u", r.grid[d], d,
                        r.cluster[d]);
    if (launch.block_threads() > 1024) return text("a block of %u threads; at most 1024 fit", launch.block_threads());
    if (r.block[2] > 64) return text("a block of %u threads along z; at most 64 fit", r.block[2]);
    if (r.grid[1] > 65535 || r.grid[2] > 65535)
        return text("a grid of %u by %u blocks along y and z; at most 65535 fit", r.grid[1], r.grid[2]);
    const uint32_t shared = launch.layout.taken(), dynamic = r.shared_bytes;
    if (shared - dynamic > 48 << 10)
        return text("%u bytes of static shared memory; at most 49152 are allowed", shared - dynamic);
    if (shared > 227 << 10) return text("%u bytes of shared memory; a block can have 232448", shared);
    if (launch.cluster_blocks() > 16) return text("a cluster of %u blocks; at most 16 fit", launch.cluster_blocks());
    return {};
}

}  // namespace

Launch::Launch(const Request& r)
    : request(r), sizes{{r.grid[0], r.grid[1], r.grid[2]},
                        {r.block[0], r.block[1], r.block[2]},
                        {r.cluster[0], r.cluster[1], r.cluster[2]}},
      layout(r) {
    error = mistake_in(*this);
    if (!error.empty()) return;
    order.resize(size_t(r.grid[0]) * r.grid[1] * r.grid[2] / cluster_blocks());
    for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    if (r.seed) std::shuffle(order.begin(), order.end(), std::mt19937(r.seed));
}

namespace {

std::string run(const Request& request, Relocation* relocation) {
    Launch launch(request);
    if (!launch.error.empty()) return launch.error;
    launch.relocation = relocation;
    const faults::Handlers handlers(request.interruptible);
    if (request.checks) checks::begin_launch(launch);
    if (request.counts) counting::begin_launch();
    std::vector<std::thread> helpers;
    const size_t workers = std::min<size_t>(request.checks || request.counts ? 1 : request.workers, launch.order.size());
    for (size_t i = 1; i < workers; ++i) helpers.emplace_back(work, std::ref(launch));
    work(launch);
    for (std::thread& helper : helpers) helper.join();
    if (request.checks) checks::end_launch();
    // Without a wait, this launch may finish before the previous one, and the next launch waits for this one only.
    if (request.checks && request.overlap && launch.error.empty() && !launch.waited)
        launch.error = "no thread called wait_for_previous_launch, in a launch that overlaps the previous one";
    return launch.error;
}

// Flips the sign bits of the fill of unset variables: 0xFE (large negative numbers) becomes 0x7E (large positive ones).
class Flipped {
  public:
    explicit Flipped(const Request& request) : request(request), lock(checks::one_launch) { flip(); }
    ~Flipped() { flip(); }

  private:
    void flip() const {
        const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
        for (uint32_t i = 0; i < request.fill_count; ++i) {
            const Fill& fill = request.fills[i];
            const uintptr_t first = fill.start / page * page, end = fill.start + fill.bytes;
            const bool is_code = fill.start - request.code.start < request.code.bytes;
            void* const pages = reinterpret_cast<void*>(first);
            if (mprotect(pages, end - first, PROT_READ | PROT_WRITE | PROT_EXEC)) return;  // fails at the first fill or not at all
            for (uintptr_t at = fill.start; at < end; ++at) *reinterpret_cast<unsigned char*>(at) ^= 0x80;
            mprotect(pages, end - first, PROT_READ | (is_code ? PROT_EXEC : 0));
        }
    }
    const Request& request;
    const std::lock_guard<std::mutex> lock;
};

// Relaunches with other bits in variables that the kernel never sets: a result that changes depends on them. Runs
// without checks, which is fast.
std::string depends_on_unset(const Request& request, const Relocation& done) {
    Request other = request;
    other.checks = 0;
    other.workers = 1;  // to keep the order
    Relocation relocation(other, true);
    if (!relocation.moves()) return {};
    std::string error;
    {
        const Flipped flipped(request);
        error = run(relocation.request(), nullptr);
    }
    if (!error.empty()) return "reads a variable that it never set; where that holds other bits: " + error;
    const auto found = done.difference(relocation);
    if (!found) return {};
    return checks::writer_of(found->address, done.request())
           + text(": writes byte %zu of buffer %u, which depends on a variable or local array that was never set", found->byte,
                  found->buffer);
}

std::string run_checked(const Request& request, bool move) {
    Relocation relocation(request, move);
    std::string error = run(relocation.request(), &relocation);
    if (relocation.escaped) return run_checked(request, false);
    if (const std::string where = error.empty() ? relocation.overwritten() : ""; !where.empty())
        error = "wrote outside the launch's buffers: " + where;
    if (error.empty() && request.fill_count && relocation.moves()) error = depends_on_unset(request, relocation);
    if (error.empty()) relocation.copy_back();
    return error;
}

}  // namespace

// Returns null or a report, which the caller frees.
extern "C" char* twin_launch(const Request* request) {
    const std::string error = request->checks ? run_checked(*request, true) : run(*request, nullptr);
    return error.empty() ? nullptr : strdup(error.c_str());
}

extern "C" void twin_free(char* report) { std::free(report); }

// ------------------------------------------------------------------ used by other files

void sleep(Sleepers& list, const Waiting& waiting) {
    checks::check_stray();
    self()->waiting = waiting;
    self()->asleep = true;
    list.push_back(self());
    hand_over();
}

void wake(Sleepers& list, const Clock& clock) {
    for (Thread* thread : list) {
        if (checking()) thread->clock.join(clock);
        thread->asleep = false;
        machine->ready.push_back(thread);
    }
    list.clear();
}

void wait::yield(Where where) {
    self()->waiting = {"__nanosleep", where};
    machine->ready.push_back(self());
    hand_over();
}

uint32_t random_below(uint32_t limit) { return machine->generator() % limit; }

void fail(Where where, const char* format, ...) {
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    fail_at(where.file ? place(where) : "", message);
}

void fail_at(const std::string& place, const std::string& message, const Thread* who) {
    std::string& error = machine->error;
    if (!place.empty()) error = place + ": ";
    if (who) error += name(*who) + ": ";
    error += message;
    if (!here) throw Failure();
    Thread* const from = self();
    here = nullptr;
    switch_fiber(*from, machine->scheduler);  // which runs no further thread
    __builtin_unreachable();
}

}  // namespace twin
