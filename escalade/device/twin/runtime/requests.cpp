// How the memory requests of warps fall. The k-th access of one instruction by the lanes of a warp is one
// request: it costs the 32-byte sectors of global memory that it touches, or as many turns of the shared
// memory as the busiest of its 32 banks has words to give.
#include "checks.h"

namespace twin::checks {

namespace {

uint64_t key(Site site, const Thread& thread) {  // of the site and the warp
    const uint32_t warps = (machine->launch->block_threads() + 31) / 32;
    return uint64_t(site) << 16 | (thread.owner->rank * warps + thread.number / 32);
}

}  // namespace

bool Requests::made(Site site, const Thread& thread) const {
    const auto found = open.find(key(site, thread));
    return found != open.end() && found->second.done[thread.number % 32];
}

void Requests::count(const Access& access, bool shared, uintptr_t position) {
    if (access.kind) return;
    Open& mine = open[key(access.site, *self())];
    const uint32_t repetition = mine.done[lane()]++;
    while (mine.closed + mine.requests.size() <= repetition) mine.requests.emplace_back();
    Request& request = mine.requests[repetition - mine.closed];
    const uintptr_t unit = shared ? 4 : 32;
    for (uintptr_t at = position / unit; at <= (position + access.bytes - 1) / unit; ++at)
        if (std::find(request.units.begin(), request.units.end(), at) == request.units.end())
            request.units.push_back(at);
    ++request.lanes;
    Total& total = totals.try_emplace(access.site, Total{shared, access.write}).first->second;
    total.bytes += access.bytes;
    while (!mine.requests.empty() && mine.requests.front().lanes == 32) {
        close(access.site, mine.requests.front());
        mine.requests.pop_front();
        ++mine.closed;
    }
}

void Requests::close(Site site, const Request& request) {
    Total& total = totals.at(site);
    uint64_t cost = request.units.size();
    if (total.shared) {
        unsigned banks[32] = {};
        cost = 0;
        for (uintptr_t word : request.units) cost = std::max<uint64_t>(cost, ++banks[word % 32]);
    }
    ++total.requests;
    total.transactions += cost;
}

void Requests::end_cluster() {  // warps that not all lanes took part in
    for (auto& [key, mine] : open)
        for (const Request& request : mine.requests)
            if (request.lanes) close(Site(key >> 16), request);
    open.clear();
}

std::string Requests::lines() {
    std::string result;
    for (auto& [site, total] : totals)
        result += place(site)
                  + text("\t%s\t%s\t%llu\t%llu\t%llu\n", total.shared ? "shared" : "global",
                         total.write ? "write" : "read", (unsigned long long)total.requests,
                         (unsigned long long)total.transactions, (unsigned long long)total.bytes);
    return result;
}

// The statistics of the last launch; the caller frees them.
extern "C" char* twin_statistics() { return strdup(state ? state->requests.lines().c_str() : ""); }

}  // namespace twin::checks
