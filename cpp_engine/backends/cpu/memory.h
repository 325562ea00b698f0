// Memory of the CPU device.
#pragma once

#include <cstddef>
#include <memory>

#include "pocket/device.h"

namespace pocket {

// Zeroed, aligned to 64 bytes; large ones lie in huge pages where the system gives them. Error(device) with the figures when there is no room.
std::unique_ptr<Buffer> allocate_memory(std::size_t num_bytes);

// Bytes of the machine or of the control group, whichever is less; 0 where the system does not say.
std::size_t total_memory();
std::size_t free_memory();

// Memory that grows with what is asked of it and is used anew by every operator. Nothing in it outlives the operator.
class Workspace {
public:
    // `count` values for each of `parts` users, each user's aligned to 64 bytes.
    template <typename T>
    void reserve(int parts, std::size_t count) {
        stride_ = (count * sizeof(T) + 63) / 64 * 64;
        if (!buffer_ || buffer_->num_bytes() < stride_ * static_cast<std::size_t>(parts)) {
            buffer_.reset();  // before the new one, so that both need not fit
            buffer_ = allocate_memory(stride_ * static_cast<std::size_t>(parts));
        }
    }
    template <typename T>
    T* of(int part) const {
        return reinterpret_cast<T*>(static_cast<std::byte*>(buffer_->data()) + static_cast<std::size_t>(part) * stride_);
    }

private:
    std::unique_ptr<Buffer> buffer_;
    std::size_t stride_ = 0;
};

}  // namespace pocket
