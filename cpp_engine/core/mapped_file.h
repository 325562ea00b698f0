// A file in memory, read-only.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

namespace pocket {

// Maps the file for the life of this object: pages are read when they are touched, and belong to the system's cache of files. The file must not be
// shortened meanwhile.
class MappedFile {
public:
    // Error(configuration) naming the file: it is missing, no file, unreadable or empty.
    explicit MappedFile(const std::filesystem::path& path);
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&& other) = delete;
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const std::string& path() const noexcept { return path_; }
    std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
    int descriptor() const noexcept { return descriptor_; }  // of the open file, for reads that take a copy

private:
    std::string path_;
    const std::byte* data_ = nullptr;
    std::size_t size_ = 0;
    int descriptor_ = -1;
};

}  // namespace pocket
