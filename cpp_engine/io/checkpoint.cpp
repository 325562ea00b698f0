#include "io/checkpoint.h"

#include <algorithm>
#include <set>
#include <system_error>
#include <utility>

#include "core/mapped_file.h"
#include "pocket/error.h"

namespace pocket {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& message) { throw Error(ErrorKind::configuration, message, "model"); }

bool is_there(const fs::path& path) {
    std::error_code error;  // what can't be looked at is said by whoever opens it
    return fs::exists(path, error) || error;
}

Json read_object(const fs::path& path) {
    const MappedFile file(path);
    const auto bytes = file.bytes();
    Json value = Json::parse({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, file.path());
    if (!value.is_object()) fail(file.path() + " holds no JSON object: download it again.");
    return value;
}

std::vector<fs::path> files_with(const fs::path& folder, const char* extension) {
    std::vector<fs::path> found;
    std::error_code error;
    for (auto entry = fs::directory_iterator(folder, error); !error && entry != fs::directory_iterator(); entry.increment(error)) {
        if (entry->path().extension() == extension) found.push_back(entry->path());
    }
    if (error) fail(folder.string() + " can't be read (" + error.message() + "): check the path and its permissions.");
    std::sort(found.begin(), found.end());
    return found;
}

}  // namespace

std::string shape_text(const std::vector<std::int64_t>& shape) {
    std::string text = "[";
    for (std::size_t place = 0; place < shape.size(); ++place) text += (place ? ", " : "") + std::to_string(shape[place]);
    return text + "]";
}

Checkpoint::Checkpoint(const fs::path& folder) : path_(folder.string()), config_path_((folder / "config.json").string()) {
    std::error_code error;
    if (!is_there(folder)) fail(path_ + " does not exist: check the path of the model.");
    if (!fs::is_directory(folder, error)) fail(path_ + " is no folder: give the folder that holds config.json and the .safetensors files.");
    if (!is_there(folder / "config.json")) fail(path_ + " has no config.json: give a folder that holds a whole checkpoint.");
    config_ = read_object(folder / "config.json");
    if (is_there(folder / "generation_config.json")) generation_config_ = read_object(folder / "generation_config.json");
    const Json* type = config_.find("model_type");
    if (!type || !type->is_string() || type->string().empty()) fail(config_path_ + " lacks the key model_type: download it again.");
    architecture_ = type->string();
    read_files(folder);
}

const Json* Checkpoint::config(std::string_view key) const {
    const Json* text = config_.find("text_config");
    const Json* value = text ? text->find(key) : nullptr;
    if (!value) value = config_.find(key);
    return value && !value->is_null() ? value : nullptr;
}

void Checkpoint::read_files(const fs::path& folder) {
    if (const fs::path index = folder / "model.safetensors.index.json"; is_there(index)) return read_index(folder, index);
    if (is_there(folder / "model.safetensors")) return add_file(folder / "model.safetensors");
    const std::vector<fs::path> files = files_with(folder, ".safetensors");
    if (files.empty()) {
        const char* other = !files_with(folder, ".gguf").empty()  ? " It has .gguf files, which backend \"torch\" reads."
                            : !files_with(folder, ".bin").empty() ? " It has .bin files: convert them to safetensors."
                                                                  : "";
        fail(path_ + " has no .safetensors file: give a folder that holds the weights." + other);
    }
    for (const fs::path& file : files) add_file(file);
}

void Checkpoint::read_index(const fs::path& folder, const fs::path& index) {
    const Json json = read_object(index);
    const Json* map = json.find("weight_map");
    const auto is_valid = [](const Json::Member& member) { return member.second.is_string() && !member.second.string().empty(); };
    if (!map || !map->is_object() || !std::all_of(map->object().begin(), map->object().end(), is_valid)) {
        fail(index.string() + " is no valid index (it needs a weight_map from tensors to names of files): download it again.");
    }
    for (const auto& [name, shard] : map->object()) {
        if (fs::path(shard.string()).filename() != shard.string() || shard.string() == ".." || shard.string() == ".") {
            fail(index.string() + " names '" + shard.string() + "' for the tensor " + name + ", which is no file of its directory: download it again.");
        }
    }
    std::set<std::string> shards;
    for (const auto& [name, shard] : map->object()) {
        const std::string& file = shard.string();
        if (!is_there(folder / file)) fail(path_ + " lacks " + file + ", which its index names for the tensor " + name + ": download it again.");
        shards.insert(shard.string());
    }
    for (const std::string& shard : shards) add_file(folder / shard);
    for (const auto& [name, shard] : map->object()) {
        const HostTensor* tensor = find(name);
        const std::string file = (folder / shard.string()).string();
        if (!tensor || tensor->file != file) fail(file + " lacks the tensor " + name + ", which " + index.string() + " places there: download both again.");
    }
}

void Checkpoint::add_file(const fs::path& path) {
    files_.emplace_back(path);  // a SafetensorsFile that moves leaves its tensors where they are
    for (const HostTensor& tensor : files_.back().tensors()) {
        const auto [place, is_new] = entries_.try_emplace(tensor.name, Entry{&tensor, false});
        if (!is_new) {
            fail("The tensor " + tensor.name + " is in both " + place->second.tensor->file + " and " + tensor.file +
                 ": remove the file that does not belong to the checkpoint.");
        }
    }
}

void Checkpoint::mark(Entry& entry) {
    num_taken_ += entry.is_taken ? 0 : 1;
    entry.is_taken = true;
}

const HostTensor& Checkpoint::take(const std::string& name, const std::vector<std::int64_t>& shape) {
    const auto found = entries_.find(name);
    if (found == entries_.end()) {
        fail((files_.size() == 1 ? files_[0].path() : path_) + " lacks the tensor " + name + ": download or convert the model again.");
    }
    const HostTensor& tensor = *found->second.tensor;
    if (tensor.shape != shape) {
        fail(tensor.file + " has the tensor " + name + " of the shape " + shape_text(tensor.shape) + " where config.json asks for " + shape_text(shape) +
             ": the file and its config do not belong together.");
    }
    mark(found->second);
    return tensor;
}

const HostTensor* Checkpoint::find(const std::string& name) const {
    const auto found = entries_.find(name);
    return found == entries_.end() ? nullptr : found->second.tensor;
}

int Checkpoint::skip(const std::string& prefix) {
    int count = 0;
    for (auto entry = entries_.lower_bound(prefix); entry != entries_.end() && entry->first.starts_with(prefix); ++entry, ++count) mark(entry->second);
    return count;
}

bool Checkpoint::has_prefix(const std::string& prefix) const {
    const auto first = entries_.lower_bound(prefix);
    return first != entries_.end() && first->first.starts_with(prefix);
}

std::vector<const HostTensor*> Checkpoint::tensors() const {
    std::vector<const HostTensor*> all;
    for (const auto& [name, entry] : entries_) all.push_back(entry.tensor);
    return all;
}

std::vector<std::string> Checkpoint::leftovers() const {
    std::vector<std::string> names;
    for (const auto& [name, entry] : entries_) {
        if (!entry.is_taken) names.push_back(name);
    }
    return names;
}

void Checkpoint::check_leftovers() const {
    const std::vector<std::string> names = leftovers();
    if (names.empty()) return;
    const std::size_t more = names.size() - 1;
    const std::string others = more == 0 ? "" : " and " + std::to_string(more) + (more == 1 ? " more tensor" : " more tensors");
    fail(find(names[0])->file + " holds the tensor " + names[0] + others + ", which a " + architecture_ +
         " model has no place for: the file is of another architecture than " + config_path_ + " says.");
}

}  // namespace pocket
