// A safetensors file: eight bytes of length, a JSON header, and the tensors' values.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/mapped_file.h"
#include "pocket/tensor.h"

namespace pocket {

// The file stays mapped while this lives, and the tensors point into it.
class SafetensorsFile {
public:
    // Error naming the file, and the tensor where it is one: the header is corrupt or says more than the file holds, a tensor's size does not suit its type
    // and shape, tensors overlap or leave holes, or a type is not read (unsupported).
    explicit SafetensorsFile(const std::filesystem::path& path);

    const std::string& path() const noexcept { return file_.path(); }
    const std::vector<HostTensor>& tensors() const noexcept { return tensors_; }  // in the order of their values

private:
    void read_header();
    void align();

    MappedFile file_;
    std::vector<HostTensor> tensors_;
    std::vector<std::unique_ptr<std::byte[]>> copies_;      // of tensors that don't lie at a multiple of their item's size
};

}  // namespace pocket
