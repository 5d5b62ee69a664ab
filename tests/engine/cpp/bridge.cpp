// The runtime for Python's ctypes: one call loads a file, runs a plan several times, and returns its results.

#include <cstring>
#include <exception>
#include <list>

#include "escalade_runtime.h"

extern "C" int bridge_run(const char* path, long batch, int calls, const void** inputs, void** outputs, char* reason,
                          std::size_t room) {
    try {
        escalade::Engine engine(path);
        const escalade::Plan& plan = engine.plan_for_batch(batch);
        for (int call = 0; call < calls; ++call) {  // each on tensors elsewhere
            std::list<escalade::DeviceMemory> memory;
            std::vector<escalade::DeviceAddress> given, made;
            for (std::size_t index = 0; index < plan.inputs().size(); ++index) {
                memory.emplace_back(engine, plan.inputs()[index].bytes).upload(inputs[index]);
                given.push_back(memory.back().address());
            }
            escalade::DeviceMemory between(engine, 256);
            for (const escalade::Tensor& tensor : plan.outputs())
                made.push_back(memory.emplace_back(engine, tensor.bytes).address());
            engine.run(plan, given, made);
            auto each = std::next(memory.begin(), static_cast<long>(given.size()));
            for (std::size_t index = 0; index < made.size(); ++index, ++each) each->download(outputs[index]);
        }
        return 0;
    } catch (const std::exception& error) {
        std::strncpy(reason, error.what(), room - 1);
        return 1;
    }
}
