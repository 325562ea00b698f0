#include "core/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "pocket/error.h"

namespace pocket {

namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) { throw Error(ErrorKind::configuration, path + " " + what, "model"); }

[[noreturn]] void fail_to_read(const std::string& path, int code) {
    if (code == ENOENT) fail(path, "does not exist: check the path of the model.");
    fail(path, "can't be read (" + std::generic_category().message(code) + "): check the path and its permissions.");
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path.string()) {
    const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe is refused below, not waited for
    if (file < 0) fail_to_read(path_, errno);
    struct stat about {};
    void* data = MAP_FAILED;
    int code = ::fstat(file, &about) ? errno : 0;
    if (!code && S_ISREG(about.st_mode) && about.st_size > 0) {
        data = ::mmap(nullptr, static_cast<std::size_t>(about.st_size), PROT_READ, MAP_PRIVATE, file, 0);
        if (data == MAP_FAILED) code = errno;
    }
    if (data == MAP_FAILED) {
        ::close(file);
        if (code) fail_to_read(path_, code);
        if (!S_ISREG(about.st_mode)) fail(path_, "is no file: check the path of the model.");
        fail(path_, "is empty: download it again.");
    }
    data_ = static_cast<const std::byte*>(data);
    size_ = static_cast<std::size_t>(about.st_size);
    descriptor_ = file;
}

MappedFile::~MappedFile() {
    if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
    if (descriptor_ >= 0) ::close(descriptor_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

}  // namespace pocket
