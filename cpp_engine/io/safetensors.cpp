#include "io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "core/json.h"
#include "pocket/error.h"

namespace pocket {

namespace {

constexpr std::uint64_t max_header = 100'000'000;  // bytes, the format's own limit

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian, and their values are used as they lie");

std::optional<DType> dtype_of(std::string_view type) {
    if (type == "F32") return DType::float32;
    if (type == "F16") return DType::float16;
    if (type == "BF16") return DType::bfloat16;
    if (type == "F8_E4M3") return DType::float8_e4m3;
    if (type == "I32") return DType::int32;
    return std::nullopt;
}

[[noreturn]] void fail(const std::string& message, ErrorKind kind = ErrorKind::configuration) { throw Error(kind, message, "model"); }

// One entry of the header, `data` the first byte behind it.
HostTensor read_entry(const std::string& file, const std::string& name, const Json& entry, std::span<const std::byte> data) {
    const Json *type = entry.find("dtype"), *shape = entry.find("shape"), *offsets = entry.find("data_offsets");
    const auto is_count = [](const Json& value) { return value.is_integer() && value.integer() >= 0; };
    const auto are_counts = [&](const Json* list) { return list && list->is_array() && std::all_of(list->array().begin(), list->array().end(), is_count); };
    const std::string corrupt = file + " has a corrupt entry for the tensor " + name + ": ";
    if (!type || !type->is_string()) fail(corrupt + "it has no dtype. Download it again.");
    if (!are_counts(shape)) fail(corrupt + "its shape is " + (shape ? shape->text() : "missing") + ". Download it again.");
    if (!are_counts(offsets) || offsets->array().size() != 2) {
        fail(corrupt + "its data_offsets are " + (offsets ? offsets->text() : "missing") + ". Download it again.");
    }
    const std::optional<DType> dtype = dtype_of(type->string());
    if (!dtype) {
        const char* const only = ", which is not read (only F32, F16, BF16, F8_E4M3 and I32): use another checkpoint.";
        fail(file + " has the tensor " + name + " of the type " + type->text() + only, ErrorKind::unsupported);
    }
    HostTensor tensor{name, file, *dtype, {}, nullptr};
    const auto item = static_cast<std::int64_t>(item_size(*dtype));
    std::int64_t num_bytes = item;
    bool is_empty = false;
    for (const Json& extent : shape->array()) {
        tensor.shape.push_back(extent.integer());
        is_empty = is_empty || extent.integer() == 0;
        if (extent.integer() == 0) continue;
        const bool fits = num_bytes <= std::numeric_limits<std::int64_t>::max() / extent.integer();
        if (!fits) fail(corrupt + "its shape is " + shape->text() + ". Download it again.");
        num_bytes *= extent.integer();
    }
    if (is_empty) num_bytes = 0;
    const std::int64_t begin = offsets->array()[0].integer(), end = offsets->array()[1].integer();
    if (end < begin || end - begin != num_bytes) {
        const std::string wanted = std::to_string(num_bytes) + " bytes of " + type->string() + " " + shape->text();
        fail(corrupt + "its data_offsets " + offsets->text() + " are not the " + wanted + ". Download it again.");
    }
    if (static_cast<std::uint64_t>(end) > data.size()) {
        fail(file + " is truncated: the tensor " + name + " ends at byte " + std::to_string(end) + " of the data, which has " + std::to_string(data.size()) +
             ". Download it again.");
    }
    tensor.data = data.data() + begin;
    return tensor;
}

std::size_t size_of(const HostTensor& tensor) { return static_cast<std::size_t>(tensor.num_elements()) * item_size(tensor.dtype); }

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path) {
    read_header();
    align();
}

void SafetensorsFile::read_header() {
    const std::span<const std::byte> bytes = file_.bytes();
    std::uint64_t length = 0;
    if (bytes.size() >= 8) std::memcpy(&length, bytes.data(), 8);
    if (bytes.size() < 8 || length > std::min<std::uint64_t>(bytes.size() - 8, max_header)) {
        fail(file_.path() + " is truncated or no safetensors file: its header has " + std::to_string(length) + " bytes by its own account, the file " +
             std::to_string(bytes.size()) + ". Download it again.");
    }
    const auto header_size = static_cast<std::size_t>(length);
    const Json header = Json::parse({reinterpret_cast<const char*>(bytes.data()) + 8, header_size}, file_.path() + ": its header");
    if (!header.is_object()) fail(file_.path() + " has a corrupt header, which is no JSON object: download it again.");
    const std::span<const std::byte> data = bytes.subspan(8 + header_size);
    for (const auto& [name, entry] : header.object()) {
        if (name == "__metadata__") continue;
        HostTensor& tensor = tensors_.emplace_back(read_entry(file_.path(), name, entry, data));
        tensor.descriptor = file_.descriptor();
        tensor.offset = tensor.data - bytes.data();
    }
    // An empty tensor lies before the one that begins where it ends.
    std::sort(tensors_.begin(), tensors_.end(), [](const HostTensor& a, const HostTensor& b) {
        return a.data != b.data ? std::less<>{}(a.data, b.data) : size_of(a) < size_of(b);
    });
    const std::byte* place = data.data();
    for (const HostTensor& tensor : tensors_) {
        if (tensor.data < place) fail(file_.path() + " has the tensor " + tensor.name + " where another one lies: download it again.");
        const std::string hole = std::to_string(tensor.data - place) + " bytes that belong to no tensor";
        if (tensor.data > place) fail(file_.path() + " has " + hole + " before the tensor " + tensor.name + ": download it again.");
        place += size_of(tensor);
    }
    if (place != data.data() + data.size()) {
        fail(file_.path() + " has " + std::to_string(data.data() + data.size() - place) + " bytes that belong to no tensor at its end: download it again.");
    }
}

void SafetensorsFile::align() {
    for (HostTensor& tensor : tensors_) {
        if (reinterpret_cast<std::uintptr_t>(tensor.data) % item_size(tensor.dtype) == 0) continue;
        copies_.push_back(std::make_unique_for_overwrite<std::byte[]>(size_of(tensor)));
        std::memcpy(copies_.back().get(), tensor.data, size_of(tensor));
        tensor.data = copies_.back().get();
        tensor.descriptor = -1;
    }
}

}  // namespace pocket
