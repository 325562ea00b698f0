// Devices that an operator's test runs on, and memory on them.
#pragma once

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/cpu/cpu_device.h"
#include "core/number_formats.h"
#include "pocket/device.h"

namespace pocket::ops {

// Every linked device, and the CPU by each instruction set that this processor has, with one thread and with three. Where the environment has TEST_DEVICE, that
// device alone: a tool that slows a GPU down a hundred times need not wait for the others.
inline void on_every_device(const std::function<void(Device&, const std::string&)>& test) {
    const char* const only = std::getenv("TEST_DEVICE");
    std::vector<std::string> names = linked_devices();
    if (only) names.assign(1, only);
    for (const std::string& name : names) {
        if (name == "cpu") continue;
        const std::unique_ptr<Device> device = make_device(name, 0);
        test(*device, name);
    }
    if (only && std::string(only) != "cpu") return;
    for (const Isa isa : available_isas()) {
        for (const int threads : {1, 3}) {
            CpuDevice device(threads, isa);
            test(device, std::string("cpu by ") + name(isa) + " on " + std::to_string(threads));
        }
    }
}

// Uniform numbers in [-1, 1), the same ones for the same seed.
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
    double next() {
        state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
        return static_cast<double>(state_ >> 11) * 0x1p-52 - 1.0;
    }
    int below(int count) { return static_cast<int>((next() + 1.0) * 0.5 * count); }
    std::vector<float> values(std::size_t count, double scale = 1.0) {
        std::vector<float> all(count);
        for (float& value : all) value = static_cast<float>(next() * scale);
        return all;
    }

private:
    std::uint64_t state_;
};

// Numbers as the bits of a type, and back.
inline std::vector<std::byte> to_bits(const std::vector<float>& values, DType dtype) {
    std::vector<std::byte> bits(values.size() * item_size(dtype));
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (dtype == DType::float32) {
            std::memcpy(&bits[i * 4], &values[i], 4);
        } else if (dtype == DType::float8_e4m3) {
            bits[i] = static_cast<std::byte>(to_float8_e4m3(values[i]));
        } else {
            const std::uint16_t half = dtype == DType::bfloat16 ? to_bfloat16(values[i]) : to_float16(values[i]);
            std::memcpy(&bits[i * 2], &half, 2);
        }
    }
    return bits;
}

inline std::vector<float> from_bits(const std::vector<std::byte>& bits, DType dtype) {
    std::vector<float> values(bits.size() / item_size(dtype));
    for (std::size_t i = 0; i < values.size(); ++i) {
        std::uint16_t half = 0;
        if (dtype == DType::float32) {
            std::memcpy(&values[i], &bits[i * 4], 4);
        } else if (dtype == DType::float8_e4m3) {
            values[i] = from_float8_e4m3(static_cast<std::uint8_t>(bits[i]));
        } else {
            std::memcpy(&half, &bits[i * 2], 2);
            values[i] = dtype == DType::bfloat16 ? from_bfloat16(half) : from_float16(half);
        }
    }
    return values;
}

inline std::vector<float> rounded(const std::vector<float>& values, DType dtype) { return from_bits(to_bits(values, dtype), dtype); }

// An array on a device.
class Array {
public:
    Array(Device& device, const std::vector<std::byte>& bits) : device_(device), buffer_(device.allocate(bits.size())) {
        device.upload(buffer_->data(), bits.data(), bits.size());
    }
    Array(Device& device, const std::vector<std::int32_t>& values) : device_(device), buffer_(device.allocate(values.size() * 4)) {
        device.upload(buffer_->data(), values.data(), values.size() * 4);
    }
    Array(Device& device, const std::vector<float>& values, DType dtype = DType::float32) : Array(device, to_bits(values, dtype)) {}

    void* data() const { return buffer_->data(); }
    const float* floats() const { return static_cast<const float*>(buffer_->data()); }
    const std::int32_t* ints() const { return static_cast<const std::int32_t*>(buffer_->data()); }
    std::vector<float> values(DType dtype = DType::float32) const {
        std::vector<std::byte> bits(buffer_->num_bytes());
        device_.download(bits.data(), buffer_->data(), bits.size());
        return from_bits(bits, dtype);
    }

private:
    Device& device_;
    std::unique_ptr<Buffer> buffer_;
};

// A weight as a file would hold it. Owns its bits.
struct HostWeight {
    std::vector<std::byte> bits;
    HostTensor tensor;

    HostWeight(const std::string& name, const std::vector<float>& values, std::int64_t rows, std::int64_t columns, DType dtype) : bits(to_bits(values, dtype)) {
        tensor = {name, "model.safetensors", dtype, {rows, columns}, bits.data()};
    }
    HostWeight(const HostWeight&) = delete;
    HostWeight& operator=(const HostWeight&) = delete;
};

// Some rows of a step with their device arrays.
class Rows {
public:
    struct Row {
        int first_position, count;   // tokens of this step
        std::vector<std::int32_t> blocks;
        int slot;
    };

    Rows(Device& device, const std::vector<Row>& rows, int num_decode, int block_size) {
        std::vector<std::int32_t> positions, slots, starts = {0}, lengths, tables, state_slots;
        int width = 1;
        for (const Row& row : rows) width = std::max(width, static_cast<int>(row.blocks.size()));
        for (const Row& row : rows) {
            for (int i = 0; i < row.count; ++i) {
                const int position = row.first_position + i;
                positions.push_back(position);
                slots.push_back(row.blocks.empty() ? 0 : row.blocks[static_cast<std::size_t>(position / block_size)] * block_size + position % block_size);
            }
            starts.push_back(static_cast<std::int32_t>(positions.size()));
            lengths.push_back(row.first_position + row.count);
            for (int i = 0; i < width; ++i) tables.push_back(i < static_cast<int>(row.blocks.size()) ? row.blocks[static_cast<std::size_t>(i)] : 0);
            state_slots.push_back(row.slot);
            step.max_query = std::max(step.max_query, row.count);
            step.max_length = std::max(step.max_length, lengths.back());
        }
        step.num_tokens = static_cast<int>(positions.size());
        step.num_rows = static_cast<int>(rows.size());
        step.num_decode = num_decode;
        step.max_blocks = width;
        step.positions = keep(device, positions);
        step.slot_mapping = keep(device, slots);
        step.row_starts = keep(device, starts);
        step.lengths = keep(device, lengths);
        step.block_tables = keep(device, tables);
        step.state_slots = keep(device, state_slots);
        device.reserve(step.num_tokens, step.num_rows);
    }

    Step step;

private:
    const std::int32_t* keep(Device& device, const std::vector<std::int32_t>& values) {
        arrays_.push_back(std::make_unique<Array>(device, values));
        return arrays_.back()->ints();
    }
    std::vector<std::unique_ptr<Array>> arrays_;
};

inline Tensor matrix(const Array& array, std::int64_t rows, std::int64_t columns, DType dtype = DType::float32) {
    return {array.data(), dtype, rows, columns, columns};
}

// How far a device's operator may be from the float64 reference, of the size of what it adds up.
inline double tolerance(Device& device) {
    return device.info().activation_dtype == DType::float32 ? 1e-5 : device.info().activation_dtype == DType::float16 ? 2e-3 : 1.6e-2;
}

}  // namespace pocket::ops
