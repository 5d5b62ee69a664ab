// A launch over copies of its buffers that lie far apart, with memory that nobody may touch in between: who runs past
// the end of one cannot come to another.
#pragma once

#include "state.h"

#include <optional>

namespace twin {

class Relocation {
  public:
    struct Move {  // of buffers that overlap, together
        uintptr_t from, to;
        uint64_t bytes;
    };

    // Without `move`, and where there is no room, all stays where it is.
    Relocation(const Request& request, bool move);
    ~Relocation();
    const Request& request() const { return moved; }
    const std::vector<Move>& all_moves() const { return all; }
    uintptr_t moved_to(uintptr_t address) const;  // the same address if it lies in no buffer
    bool moves() const { return memory; }
    struct Difference {
        uintptr_t address;
        uint32_t buffer;
        size_t byte;
    };
    std::optional<Difference> difference(const Relocation& other) const;  // the first byte that `other` has otherwise
    bool was_moved(uintptr_t address) const;      // it belongs to a buffer, and not to its copy
    bool holds_parameters(uintptr_t address) const { return address - parameters_start() < parameter_bytes.size(); }
    std::string overwritten() const;  // which bytes beside the copies were written; empty: none
    void copy_back() const;

    // The kernel went to a buffer by an address that was not among its parameters (a table of pointers, say): the
    // launch has to be done again where the buffers are.
    bool escaped = false;

  private:
    struct Margin {  // bytes in front of a copy and behind it, up to the pages that are not there
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
