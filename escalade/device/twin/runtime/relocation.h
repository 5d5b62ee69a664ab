// A launch over copies of its buffers that are far apart, with inaccessible memory in between: an overrun of one cannot
// reach another.
#pragma once

#include "state.h"

#include <optional>

namespace twin {

class Relocation {
  public:
    struct Move {  // overlapping buffers are moved together
        uintptr_t from, to;
        uint64_t bytes;
    };

    // Without `move`, or if address space is short, all buffers stay in place.
    Relocation(const Request& request, bool move);
    ~Relocation();
    const Request& request() const { return moved; }
    const std::vector<Move>& all_moves() const { return all; }
    uintptr_t moved_to(uintptr_t address) const;  // the same address if it is in no buffer
    bool moves() const { return memory; }
    struct Difference {
        uintptr_t address;
        uint32_t buffer;
        size_t byte;
    };
    std::optional<Difference> difference(const Relocation& other) const;  // the first byte that differs in `other`
    bool was_moved(uintptr_t address) const;      // it is inside a buffer, and not inside its copy
    bool holds_parameters(uintptr_t address) const { return address - parameters_start() < parameter_bytes.size(); }
    std::string overwritten() const;  // which bytes beside the copies were written; empty: none
    void copy_back() const;

    // The kernel accessed a buffer by an address that was not among its parameters (from a table of pointers, say): the
    // launch must be repeated on the original buffers.
    bool escaped = false;

  private:
    struct Margin {  // bytes before and after a copy, up to the inaccessible pages
        uintptr_t start, end;
    };
    bool reserve();
    void copy_parameters();
    uintptr_t parameters_start() const { return reinterpret_cast<uintptr_t>(parameter_bytes.data()); }

    Request moved;
    std::vector<Move> all;
    std::vector<Margin> margins;
    std::vector<Range> buffers;
    std::vector<unsigned char> parameter_bytes;
    std::vector<void*> parameters;
    void* memory = nullptr;
    size_t memory_bytes = 0;
};

}  // namespace twin
