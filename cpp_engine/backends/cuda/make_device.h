// The door to the CUDA device, without CUDA's own headers.
#pragma once

#include <memory>

#include "pocket/device.h"

namespace pocket::cuda {

// 0 where there is no driver or no GPU.
int num_devices() noexcept;

// Device number `ordinal`. Error(unsupported) naming the field "device" where there is none such, or it is older than Turing.
std::unique_ptr<Device> make_device(int ordinal);

}  // namespace pocket::cuda
