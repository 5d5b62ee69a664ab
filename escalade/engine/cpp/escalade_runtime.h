// Runs the plans that `escalade build --cpp` wrote, through the CUDA driver alone: no Python, no CUDA runtime library.
//
//     escalade::Engine engine("network.plans");
//     const escalade::Plan& plan = engine.plan_for_batch(8);
//     escalade::DeviceMemory image(engine, plan.inputs()[0].bytes), scores(engine, plan.outputs()[0].bytes);
//     image.upload(host_image);
//     engine.run(plan, {image.address()}, {scores.address()});
//     scores.download(host_scores);
//
// Every error is an escalade::Error with a sentence.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace escalade {

class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// An address on the GPU: the driver's CUdeviceptr, which the runtime library's pointers convert to.
using DeviceAddress = unsigned long long;

// A stream: the driver's CUstream or the runtime library's cudaStream_t; nullptr is the default stream.
using Stream = void*;

// An input or output of a plan. Strides are in elements; images in channels_last have a channel stride of 1.
struct Tensor {
    std::string name;
    std::string dtype;  // PyTorch's name: float32, float16, bfloat16, uint8, int64, ...
    std::vector<std::int64_t> shape;
    std::vector<std::int64_t> strides;
    std::size_t bytes = 0;
};

class Engine;

// The network for inputs of fixed shapes.
class Plan {
public:
    ~Plan();
    Plan(Plan&&) noexcept;
    const std::vector<Tensor>& inputs() const;
    const std::vector<Tensor>& outputs() const;
    std::int64_t batch() const;  // size of the first input's first dimension
    std::size_t launches() const;

private:
    friend class Engine;
    struct State;
    explicit Plan(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

// The plans of a file, loaded onto one GPU.
class Engine {
public:
    explicit Engine(const std::string& path, int device = 0);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    const std::vector<Plan>& plans() const;
    const Plan& plan_for_batch(std::int64_t batch) const;
    const std::string& dtype() const;  // the dtype that the network was compiled for, such as fp16

    // Allocates a plan's memory and packs its weights, and waits for that. The first run of a plan does so too.
    void prepare(const Plan& plan);

    // Enqueues the plan on a stream. Inputs and outputs are packed tensors on the GPU at multiples of 16 bytes, which
    // must stay until the stream has finished. Calls of one plan use the same scratch memory: enqueue them on one stream,
    // or load an engine for each. Once the plan is prepared, a call may be captured into a CUDA graph.
    void run(const Plan& plan, const std::vector<DeviceAddress>& inputs, const std::vector<DeviceAddress>& outputs,
             Stream stream = nullptr);
    void synchronize(Stream stream = nullptr);

private:
    friend class DeviceMemory;
    struct State;
    std::unique_ptr<State> state_;
};

// Memory on an engine's GPU.
class DeviceMemory {
public:
    DeviceMemory(Engine& engine, std::size_t bytes);
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    DeviceAddress address() const { return address_; }
    std::size_t bytes() const { return bytes_; }
    void upload(const void* host);    // all bytes; returns when they are copied
    void download(void* host) const;  // all bytes, after all work that was enqueued before

private:
    Engine& engine_;
    DeviceAddress address_ = 0;
    std::size_t bytes_ = 0;
};

}  // namespace escalade
