// A Hugging Face checkpoint in a folder: config.json and the tensors of its safetensors files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "io/safetensors.h"
#include "pocket/tensor.h"

namespace pocket {

// Hands out tensors by name and notices which were not asked for. They point into files that stay mapped while this lives.
class Checkpoint {
public:
    // Reads config.json, generation_config.json and the headers of model.safetensors.index.json's shards, else of model.safetensors, else of every
    // *.safetensors. Error naming the file, and the tensor where it is one: what SafetensorsFile refuses, a shard that the index names and that is absent,
    // a tensor that is in two files or not where the index says.
    explicit Checkpoint(const std::filesystem::path& folder);

    const std::string& path() const noexcept { return path_; }
    const std::string& config_path() const noexcept { return config_path_; }
    const std::string& architecture() const noexcept { return architecture_; }  // model_type of config.json, at its top

    // What config.json says under `key`; text_config, where there is one, goes before the top level. Null pointer where neither has the key or it is null.
    const Json* config(std::string_view key) const;
    const Json& raw_config() const noexcept { return config_; }
    const Json& generation_config() const noexcept { return generation_config_; }  // null where there is none

    // The tensor `name`, marked as taken. Error naming file and tensor where it is missing or has another shape.
    const HostTensor& take(const std::string& name, const std::vector<std::int64_t>& shape);
    // The tensor `name`, or null, not marked.
    const HostTensor* find(const std::string& name) const;
    // Marks every tensor whose name begins so. Returns how many there are.
    int skip(const std::string& prefix);

    bool has_prefix(const std::string& prefix) const;
    std::vector<const HostTensor*> tensors() const;         // in the order of their names
    std::size_t num_taken() const noexcept { return num_taken_; }
    std::vector<std::string> leftovers() const;             // names that were neither taken nor skipped, in order
    // Error naming the first leftover.
    void check_leftovers() const;

private:
    struct Entry {
        const HostTensor* tensor = nullptr;
        bool is_taken = false;
    };
    void read_files(const std::filesystem::path& folder);
    void read_index(const std::filesystem::path& folder, const std::filesystem::path& index);
    void add_file(const std::filesystem::path& path);
    void mark(Entry& entry);

    std::string path_, config_path_, architecture_;
    Json config_, generation_config_;
    std::vector<SafetensorsFile> files_;
    std::map<std::string, Entry> entries_;
    std::size_t num_taken_ = 0;
};

// "[2, 3]"
std::string shape_text(const std::vector<std::int64_t>& shape);

}  // namespace pocket
