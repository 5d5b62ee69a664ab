#include "counting.h"

#include <unordered_map>

namespace twin::counting {
namespace {

constexpr uint32_t IS_WHERE = 1u << 31, SECTOR_BYTES = 32, WORD_BYTES = 4, BANKS = 32, BUFFER_SHIFT = 44;

struct Event {
    uint64_t position;  // in memory; for a basic block, the height of its frame above the end of the stack
    uint32_t site;
    uint16_t bytes;
    Kind kind;
};

struct Total {  // of the requests of one source line
    uint64_t requests = 0, transactions = 0, least = 0, bytes = 0;
};

class Bytes {  // set of touched buffer bytes
  public:
    void add(uint64_t position, uint32_t bytes) {
        const size_t buffer = position >> BUFFER_SHIFT;
        if (marks.size() <= buffer) marks.resize(buffer + 1);
        auto& own = marks[buffer];
        const uint64_t first = position & ((1ull << BUFFER_SHIFT) - 1), end = first + bytes;
        if (own.size() <= (end - 1) / 64) own.resize(std::max<size_t>(2 * own.size(), (end - 1) / 64 + 1));
        for (uint64_t at = first; at < end; ++at) {
            const uint64_t bit = 1ull << at % 64;
            count += !(own[at / 64] & bit);
            own[at / 64] |= bit;
        }
    }
    uint64_t count = 0;

  private:
    std::vector<std::vector<uint64_t>> marks;  // per buffer, one bit per byte
};

struct Lane {  // a lane of a warp, and a range of its events
    unsigned number;
    const Event *from, *to;
};

struct Lanes {  // the lanes of one warp access
    unsigned count = 0, number[32];
    const Event* of[32];
};

struct State {
    std::vector<std::vector<Event>> threads;  // by slot: events since the last convergence
    std::map<std::pair<uint32_t, Kind>, Total> totals;
    std::unordered_map<uint32_t, uint64_t> blocks;  // executions per basic block
    std::vector<Where> wheres;
    Bytes read, written;
    uint64_t products = 0, multiplications = 0, shuffles = 0, atomics = 0;
    uint64_t bulk_copies[2] = {}, bulk_sectors[2] = {};  // loads and stores
};

thread_local std::unique_ptr<State> state;

uint32_t site_of(Where where) {
    auto& wheres = state->wheres;
    for (size_t i = wheres.size(); i-- > 0;)
        if (wheres[i].line == where.line && wheres[i].file == where.file) return IS_WHERE | uint32_t(i);
    wheres.push_back(where);
    return IS_WHERE | uint32_t(wheres.size() - 1);
}

void note(Kind kind, uint64_t position, uint32_t bytes, uint32_t site) {
    state->threads[self()->slot].push_back({position, site, uint16_t(bytes), kind});
}

// ------------------------------------------------------------------ positions of addresses

// GPU allocations are aligned to more than a sector, host allocations may not be. So positions are relative to the
// start of their buffer, and each buffer has its own range.
bool global_position(uintptr_t address, uint64_t& position) {
    const Request& request = settings();
    const Range* end = request.buffers + request.buffer_count;
    const Range* next = std::upper_bound(request.buffers, end, address,
                                         [](uintptr_t value, const Range& range) { return value < range.start; });
    if (next == request.buffers || address - next[-1].start >= next[-1].bytes) return false;
    position = uint64_t(next - request.buffers) << BUFFER_SHIFT | (address - next[-1].start);
    return true;
}

const Block* block_with(uintptr_t address, uint64_t& position) {
    for (const Block& block : machine->blocks) {
        position = address - reinterpret_cast<uintptr_t>(block.arena);
        if (position < machine->launch->layout.room_bytes) return &block;
    }
    return nullptr;
}

// ------------------------------------------------------------------ requests

unsigned distinct(std::vector<uint64_t>& units) {
    std::sort(units.begin(), units.end());
    units.erase(std::unique(units.begin(), units.end()), units.end());
    return unsigned(units.size());
}

// Wavefronts: the number of words in the busiest bank.
unsigned bank_turns(const std::vector<uint64_t>& words) {
    unsigned banks[BANKS] = {}, most = 0;
    for (uint64_t word : words) most = std::max(most, ++banks[word % BANKS]);
    return most;
}

// Returns true if every lane reads the same as its neighbor at distance 1, or every lane as the one at distance 2. The
// hardware then serves twice as many lanes per wavefront.
bool in_pairs(const Lanes& lanes) {
    uint64_t position[32];
    bool asks[32] = {}, beside[2] = {true, true};
    for (unsigned i = 0; i < lanes.count; ++i)
        position[lanes.number[i]] = lanes.of[i]->position, asks[lanes.number[i]] = true;
    for (unsigned lane = 0; lane < 32; ++lane)
        for (unsigned distance : {1u, 2u})
            if (asks[lane] && asks[lane ^ distance] && position[lane] != position[lane ^ distance])
                beside[distance - 1] = false;
    return beside[0] || beside[1];
}

// 8-byte accesses are served per half warp, 16-byte accesses per quarter warp.
void close_shared(const Lanes& lanes, Total& total) {
    const Event& first = *lanes.of[0];
    unsigned together = first.bytes > 8 ? 8 : first.bytes > 4 ? 16 : 32;
    if (together < 32 && first.kind == Kind::shared_load && in_pairs(lanes)) together *= 2;
    static thread_local std::vector<uint64_t> words;
    for (unsigned i = 0; i < lanes.count;) {
        words.clear();
        const unsigned group = lanes.number[i] / together;
        for (; i < lanes.count && lanes.number[i] / together == group; ++i)
            for (uint64_t at = lanes.of[i]->position / WORD_BYTES;
                 at <= (lanes.of[i]->position + lanes.of[i]->bytes - 1) / WORD_BYTES; ++at)
                words.push_back(at);
        distinct(words);
        total.transactions += bank_turns(words);
        ++total.least;
    }
}

void close(const Lanes& lanes) {
    const Event& first = *lanes.of[0];
    Total& total = state->totals[{first.site, first.kind}];
    ++total.requests;
    for (unsigned i = 0; i < lanes.count; ++i) total.bytes += lanes.of[i]->bytes;
    if (first.kind >= Kind::shared_load && first.kind <= Kind::shared_copy) return close_shared(lanes, total);
    static thread_local std::vector<uint64_t> sectors;
    sectors.clear();
    for (unsigned i = 0; i < lanes.count; ++i) {
        const Event& event = *lanes.of[i];
        for (uint64_t at = event.position / SECTOR_BYTES;
             event.bytes && at <= (event.position + event.bytes - 1) / SECTOR_BYTES; ++at)
            sectors.push_back(at);
    }
    const unsigned found = distinct(sectors);
    total.transactions += found;
    total.least += found;
}

// Lanes make the same accesses in a basic block; a lane that exited early has fewer.
void close_block(const std::vector<Lane>& active) {
    for (size_t i = 0;; ++i) {
        Lanes lanes[size_t(Kind::barrier) + 1];
        bool any = false;
        for (const auto& [number, from, to] : active) {
            if (size_t(to - from) <= i) continue;
            Lanes& own = lanes[size_t(from[i].kind)];
            own.number[own.count] = number;
            own.of[own.count++] = from + i;
            any = true;
        }
        if (!any) return;
        for (const Lanes& each : lanes)
            if (each.count) close(each);
    }
}

bool goes_before(const Event& one, const Event& other) {
    return one.position != other.position ? one.position < other.position : one.site < other.site;
}

}  // namespace

void end_warp(const Block& block, unsigned warp) {
    const unsigned threads = machine->launch->block_threads(), first = 32 * warp, last = std::min(threads, first + 32);
    const Event* at[32];
    const Event* ends[32];
    const unsigned lanes = last - first;
    std::vector<Lane> active;
    const auto is_block = [](const Event& event) { return event.kind == Kind::block; };
    for (unsigned lane = 0; lane < lanes; ++lane) {  // the rest of the basic block that contained a barrier
        const auto& events = state->threads[block.rank * threads + first + lane];
        at[lane] = events.data(), ends[lane] = events.data() + events.size();
        const Event* next = std::find_if(at[lane], ends[lane], is_block);
        active.push_back({lane, at[lane], next});
        at[lane] = next;
    }
    close_block(active);
    while (true) {
        const Event* chosen = nullptr;
        for (unsigned lane = 0; lane < lanes; ++lane)
            if (at[lane] != ends[lane] && (!chosen || goes_before(*at[lane], *chosen))) chosen = at[lane];
        if (!chosen) break;
        const Event here = *chosen;
        active.clear();
        for (unsigned lane = 0; lane < lanes; ++lane) {
            if (at[lane] == ends[lane] || at[lane]->site != here.site || at[lane]->position != here.position) continue;
            const Event* next = std::find_if(at[lane] + 1, ends[lane], is_block);
            active.push_back({lane, at[lane] + 1, next});
            at[lane] = next;
        }
        state->blocks[here.site] += active.size();
        close_block(active);
    }
    for (unsigned lane = 0; lane < lanes; ++lane) state->threads[block.rank * threads + first + lane].clear();
}

void end_warps(const Block& block) {
    for (unsigned warp = 0; warp < block.warps.size(); ++warp) end_warp(block, warp);
}

// ------------------------------------------------------------------ events of threads

void enter_block(uint32_t site, const void* frame) {
    note(Kind::block, static_cast<const char*>(frame) - self()->stack, 0, site);
}

void access(uintptr_t address, uint32_t bytes, bool write, uint32_t site) {
    uint64_t position;
    Kind kind;
    if (const Block* block = block_with(address, position)) {
        kind = write ? Kind::shared_store : Kind::shared_load;
        if (block != self()->owner) kind = write ? Kind::cluster_store : Kind::cluster_load;
    } else if (global_position(address, position)) {
        kind = write ? Kind::global_store : Kind::global_load;
        (write ? state->written : state->read).add(position, bytes);
    } else {
        return;  // a local variable or a constant
    }
    constexpr uint32_t MOST = 16;  // bytes per instruction: a larger struct takes several
    for (uint32_t done = 0; done < bytes; done += MOST) note(kind, position + done, std::min(MOST, bytes - done), site);
}

void atomic(uintptr_t address, uint32_t bytes, Where where) {
    uint64_t position;
    ++state->atomics;
    if (block_with(address, position)) return note(Kind::shared_atomic, position, bytes, site_of(where));
    if (!global_position(address, position)) return;
    state->written.add(position, bytes);
    note(Kind::global_atomic, position, bytes, site_of(where));
}

void copy(const void* global, uint32_t shared, uint32_t bytes, Where where) {
    const auto address = reinterpret_cast<uintptr_t>(global);
    const uint32_t site = site_of(where);
    uint64_t position = 0;
    const bool read = global && global_position(address, position);
    if (read) state->read.add(position, bytes);
    note(Kind::global_copy, position, read ? bytes : 0, site);
    note(Kind::shared_copy, shared, bytes, site);
}

void push(uint32_t bytes, Where where) { note(Kind::cluster_store, 0, bytes, site_of(where)); }

void barrier(Where where) { note(Kind::barrier, 0, 0, site_of(where)); }

void matrices(const uint32_t* rows, int count, bool write, Where where) {
    Total& total = state->totals[{site_of(where), write ? Kind::shared_store : Kind::shared_load}];
    ++total.requests;
    total.bytes += count * 128;
    total.least += count;
    for (int matrix = 0; matrix < count; ++matrix) {
        std::vector<uint64_t> words;
        for (int row = 0; row < 8; ++row)
            for (int word = 0; word < 4; ++word) words.push_back(rows[8 * matrix + row] / WORD_BYTES + word);
        distinct(words);
        total.transactions += bank_turns(words);
    }
}

void product(uint64_t multiplications) {
    ++state->products;
    state->multiplications += multiplications;
}

void shuffle() { ++state->shuffles; }

void bulk(bool write) { ++state->bulk_copies[write]; }

void bulk_row(const void* address, uint32_t bytes, bool write) {
    const auto start = reinterpret_cast<uintptr_t>(address);
    uint64_t position;
    if (!bytes || !global_position(start, position)) return;
    (write ? state->written : state->read).add(position, bytes);
    state->bulk_sectors[write] += (position + bytes - 1) / SECTOR_BYTES - position / SECTOR_BYTES + 1;
}

// ------------------------------------------------------------------ called by the scheduler

void begin_launch() { state = std::make_unique<State>(); }

void begin_cluster() {
    state->threads.resize(machine->launch->cluster_threads());
    for (auto& events : state->threads) events.clear();
}

// Returns the counts of this thread's last counted launch, one per line; the caller frees the string.
extern "C" char* twin_counts() {
    static const char* const names[] = {"", "global\tload", "global\tstore", "global\tatomic", "global\tcopy",
                                        "shared\tload", "shared\tstore", "shared\tatomic", "shared\tcopy",
                                        "cluster\tload", "cluster\tstore", "block\tbarrier"};
    if (!state) return strdup("");
    std::string lines;
    const auto number = [](uint64_t value) { return "\t" + std::to_string(value); };
    for (const auto& [key, total] : state->totals) {
        const auto [site, kind] = key;
        const std::string where = site & IS_WHERE ? place(state->wheres[site & ~IS_WHERE]) : text("[+%#x]", site);
        lines += "request\t" + where + "\t" + names[size_t(kind)] + number(total.requests) + number(total.transactions)
                 + number(total.least) + number(total.bytes) + "\n";
    }
    for (const auto& [site, threads] : state->blocks) lines += "code" + number(site) + number(threads) + "\n";
    const std::pair<const char*, uint64_t> others[] = {
        {"unique_read_bytes", state->read.count},           {"unique_written_bytes", state->written.count},
        {"tensor_instructions", state->products},    {"tensor_multiplications", state->multiplications},
        {"shuffles", state->shuffles},               {"atomics", state->atomics},
        {"bulk_loads", state->bulk_copies[0]},       {"bulk_stores", state->bulk_copies[1]},
        {"bulk_load_sectors", state->bulk_sectors[0]}, {"bulk_store_sectors", state->bulk_sectors[1]}};
    for (const auto& [name, value] : others) lines += std::string("total\t") + name + number(value) + "\n";
    return strdup(lines.c_str());
}

}  // namespace twin::counting
