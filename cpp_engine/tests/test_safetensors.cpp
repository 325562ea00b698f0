// io/safetensors: what a file says is checked against what it holds, each fault one error that names file and tensor.
#include "io/safetensors.h"

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "check.h"
#include "pocket/error.h"
#include "tiny_checkpoint.h"

using namespace pocket;

namespace {

StoredTensors two_tensors() { return {{"a", store({1, 2, 3, 4, 5, 6}, {2, 3}, "F32")}, {"b", store({7, 8}, {2}, "BF16")}}; }

// Opens a file of the data of two_tensors() (24 and 4 bytes) under another header.
void open_with(const std::string& header) {
    const TemporaryFolder folder;
    write_file(folder.path() / "m.safetensors", safetensors_bytes(two_tensors(), header));
    SafetensorsFile file(folder.path() / "m.safetensors");
}

std::string entry(const std::string& name, const std::string& type, const std::string& shape, const std::string& offsets) {
    return "\"" + name + R"(":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

const std::string whole_a = entry("a", "F32", "[2,3]", "[0,24]"), whole_b = entry("b", "BF16", "[2]", "[24,28]");

}  // namespace

TEST(a_whole_file) {
    const TemporaryFolder folder;
    write_file(folder.path() / "m.safetensors", safetensors_bytes(two_tensors()));
    const SafetensorsFile file(folder.path() / "m.safetensors");
    CHECK_EQ(file.tensors().size(), 2u);
    const HostTensor &a = file.tensors()[0], &b = file.tensors()[1];
    CHECK_EQ(a.name, std::string("a"));
    CHECK_EQ(a.file, (folder.path() / "m.safetensors").string());
    CHECK_EQ(a.shape, (std::vector<std::int64_t>{2, 3}));
    CHECK_EQ(a.dtype, DType::float32);
    CHECK_EQ(reinterpret_cast<const float*>(a.data)[5], 6.0f);
    CHECK_EQ(b.dtype, DType::bfloat16);
    CHECK_EQ(reinterpret_cast<const std::uint16_t*>(b.data)[1], to_bfloat16(8));
    std::uint16_t values[2] = {};  // by a read, as loaders of other memories have them
    CHECK_EQ(pread(b.descriptor, values, sizeof values, b.offset), 4);
    CHECK_EQ(values[1], to_bfloat16(8));
}

TEST(metadata_order_and_empty_tensors) {
    open_with(R"({"__metadata__":{"format":"pt"},)" + whole_b + "," + whole_a + "}");
    open_with("{" + whole_a + "," + whole_b + "," + entry("c", "F32", "[0,7]", "[24,24]") + "," + entry("d", "F32", "[0]", "[28,28]") + "}");
    open_with("{" + entry("a", "F32", "[]", "[0,4]") + "," + entry("b", "I32", "[6]", "[4,28]") + "}");
}

TEST(values_that_are_not_aligned_are_copied) {
    const TemporaryFolder folder;
    std::string header = "{" + whole_a + "," + whole_b + "}";
    header.resize((header.size() + 7) / 8 * 8 + 1, ' ');
    write_file(folder.path() / "m.safetensors", safetensors_bytes(two_tensors(), header));
    const SafetensorsFile file(folder.path() / "m.safetensors");
    const HostTensor& a = file.tensors()[0].name == "a" ? file.tensors()[0] : file.tensors()[1];
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(a.data) % 4, 0u);
    CHECK_EQ(reinterpret_cast<const float*>(a.data)[5], 6.0f);
}

TEST(a_truncated_file) {
    const TemporaryFolder folder;
    const auto path = folder.path() / "m.safetensors";
    const std::string bytes = safetensors_bytes(two_tensors());
    for (std::size_t size = 1; size < bytes.size(); ++size) {
        write_file(path, bytes.substr(0, size));
        CHECK_THROWS(SafetensorsFile{path}, path.string() + " is truncated");
    }
    write_file(path, bytes.substr(0, bytes.size() - 1));
    CHECK_THROWS(SafetensorsFile{path}, "the tensor b ends at byte 28 of the data, which has 27");
    write_file(path, "");
    CHECK_THROWS(SafetensorsFile{path}, path.string() + " is empty: download it again.");
    write_file(path, bytes + "x");
    CHECK_THROWS(SafetensorsFile{path}, "has 1 bytes that belong to no tensor at its end");
}

TEST(files_that_cannot_be_opened) {
    const TemporaryFolder folder;
    CHECK_THROWS(SafetensorsFile{folder.path() / "absent.safetensors"}, "absent.safetensors does not exist");
    CHECK_THROWS(SafetensorsFile{folder.path()}, folder.path().string() + " is no file");
}

TEST(a_header_length_past_the_end) {
    const TemporaryFolder folder;
    const auto path = folder.path() / "m.safetensors";
    std::string bytes = safetensors_bytes(two_tensors());
    for (const std::uint64_t length : {std::uint64_t{1} << 40, ~std::uint64_t{0}, std::uint64_t{bytes.size() - 7}, std::uint64_t{100'000'001}}) {
        std::memcpy(bytes.data(), &length, 8);
        write_file(path, bytes);
        CHECK_THROWS(SafetensorsFile{path}, "its header has " + std::to_string(length) + " bytes by its own account, the file " + std::to_string(bytes.size()));
    }
}

TEST(corrupt_headers) {
    CHECK_THROWS(open_with("{]"), "m.safetensors: its header is not valid JSON (no key, at byte 1)");
    CHECK_THROWS(open_with("[]"), "m.safetensors has a corrupt header, which is no JSON object");
    CHECK_THROWS(open_with("{" + whole_a + "," + whole_a + "}"), "the key \"a\" twice");
    CHECK_THROWS(open_with(R"({"a":7})"), "m.safetensors has a corrupt entry for the tensor a: it has no dtype");
    CHECK_THROWS(open_with(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})"), "the tensor a: its shape is missing");
    CHECK_THROWS(open_with(R"({"a":{"dtype":"F32","shape":[1]}})"), "the tensor a: its data_offsets are missing");
}

TEST(entries_that_make_no_sense) {
    const auto with_a = [](const std::string& type, const std::string& shape, const std::string& offsets) {
        open_with("{" + entry("a", type, shape, offsets) + "," + whole_b + "}");
    };
    CHECK_THROWS(with_a("F32", "[2,-3]", "[0,24]"), "the tensor a: its shape is [2, -3]");
    CHECK_THROWS(with_a("F32", "[2.0,3]", "[0,24]"), "the tensor a: its shape is [2, 3]");
    CHECK_THROWS(with_a("F32", "6", "[0,24]"), "the tensor a: its shape is 6");
    CHECK_THROWS(with_a("F32", "[4294967296,4294967296]", "[0,24]"), "the tensor a: its shape is [4294967296, 4294967296]");
    CHECK_THROWS(with_a("F32", "[2,3]", "[-24,0]"), "the tensor a: its data_offsets are [-24, 0]");
    CHECK_THROWS(with_a("F32", "[2,3]", "[24,0]"), "the tensor a: its data_offsets [24, 0] are not the 24 bytes of F32 [2, 3]");
    CHECK_THROWS(with_a("F32", "[2,3]", "[0,20]"), "the tensor a: its data_offsets [0, 20] are not the 24 bytes");
    CHECK_THROWS(with_a("F32", "[2,3]", "[0]"), "the tensor a: its data_offsets are [0]");
    CHECK_THROWS(with_a("F32", "[2,4]", "[0,24]"), "are not the 32 bytes of F32 [2, 4]");
    CHECK_THROWS(with_a("F32", "[2,3]", "[100,124]"), "is truncated: the tensor a ends at byte 124 of the data, which has 28");
}

TEST(unknown_types) {
    for (const char* type : {"I64", "F64", "U8", "F8_E5M2", "BOOL", "nonsense"}) {
        const std::string words = std::string("m.safetensors has the tensor a of the type \"") + type + "\"";
        CHECK_THROWS(open_with("{" + entry("a", type, "[3]", "[0,24]") + "," + whole_b + "}"), words);
    }
    try {
        open_with("{" + entry("a", "I64", "[3]", "[0,24]") + "}");
    } catch (const Error& error) {
        CHECK_EQ(error.kind(), ErrorKind::unsupported);
    }
}

TEST(overlaps_and_holes) {
    CHECK_THROWS(open_with("{" + whole_a + "," + entry("b", "BF16", "[2]", "[20,24]") + "}"), "has the tensor b where another one lies");
    CHECK_THROWS(open_with("{" + whole_a + "," + entry("b", "F32", "[2,3]", "[0,24]") + "}"), "where another one lies");
    CHECK_THROWS(open_with("{" + whole_b + "}"), "has 24 bytes that belong to no tensor before the tensor b");
    CHECK_THROWS(open_with("{" + whole_a + "}"), "has 4 bytes that belong to no tensor at its end");
}
