// Runs one plan of a file on raw tensors:
//
//     run network.plans [--batch N] [--repeat N] [--device N] [--input FILE]... [--output FILE]...
//
// Inputs without a file are zeros. Files hold the bytes of a tensor in the dtype, shape and strides that are printed.

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <list>

#include "escalade_runtime.h"

namespace {

std::vector<char> read(const std::string& path, std::size_t bytes) {
    std::ifstream file(path, std::ios::binary);
    std::vector<char> data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (!file || data.size() != bytes)
        throw escalade::Error(path + " has " + std::to_string(data.size()) + " bytes; the input has " +
                              std::to_string(bytes));
    return data;
}

void print(const char* kind, const escalade::Tensor& tensor) {
    std::cout << kind << " " << tensor.name << ": " << tensor.dtype << " [";
    for (std::size_t index = 0; index < tensor.shape.size(); ++index)
        std::cout << (index ? ", " : "") << tensor.shape[index];
    std::cout << "], " << tensor.bytes << " bytes\n";
}

int run(int count, char** arguments) {
    std::string plans;
    std::vector<std::string> input_files, output_files;
    long batch = 0, repeat = 1, device = 0;
    for (int index = 1; index < count; ++index) {
        const std::string option = arguments[index];
        if (option.rfind("--", 0) != 0) {
            plans = option;
            continue;
        }
        if (index + 1 == count) throw escalade::Error(option + " needs a value");
        const std::string value = arguments[++index];
        if (option == "--input") input_files.push_back(value);
        else if (option == "--output") output_files.push_back(value);
        else if (option == "--batch") batch = std::stol(value);
        else if (option == "--repeat") repeat = std::stol(value);
        else if (option == "--device") device = std::stol(value);
        else throw escalade::Error("there is no option " + option);
    }
    if (plans.empty()) throw escalade::Error("usage: run network.plans [--batch N] [--input FILE] [--output FILE]");
    escalade::Engine engine(plans, static_cast<int>(device));
    const escalade::Plan& plan = batch ? engine.plan_for_batch(batch) : engine.plans().at(0);
    if (input_files.size() > plan.inputs().size() || output_files.size() > plan.outputs().size())
        throw escalade::Error("there are more files than inputs or outputs");

    std::list<escalade::DeviceMemory> memory;
    std::vector<escalade::DeviceAddress> inputs, outputs;
    for (const escalade::Tensor& tensor : plan.inputs()) {
        print("input", tensor);
        const std::size_t index = inputs.size();
        const auto data = index < input_files.size() ? read(input_files[index], tensor.bytes)
                                                     : std::vector<char>(tensor.bytes);
        memory.emplace_back(engine, tensor.bytes).upload(data.data());
        inputs.push_back(memory.back().address());
    }
    for (const escalade::Tensor& tensor : plan.outputs()) {
        print("output", tensor);
        outputs.push_back(memory.emplace_back(engine, tensor.bytes).address());
    }

    engine.run(plan, inputs, outputs);
    engine.synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (long call = 0; call < repeat; ++call) engine.run(plan, inputs, outputs);
    engine.synchronize();
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
    std::cout << plan.launches() << " launches, " << elapsed.count() / static_cast<double>(repeat) << " us per call\n";

    auto each = std::next(memory.begin(), static_cast<long>(inputs.size()));
    for (std::size_t index = 0; index < output_files.size(); ++index, ++each) {
        std::vector<char> data(each->bytes());
        each->download(data.data());
        std::ofstream(output_files[index], std::ios::binary).write(data.data(), static_cast<long>(data.size()));
    }
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    try {
        return run(count, arguments);
    } catch (const std::exception& error) {
        std::cerr << "run: " << error.what() << "\n";
        return 1;
    }
}
