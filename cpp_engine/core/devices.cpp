#include "backends/cpu/cpu_device.h"
#include "pocket/device.h"
#include "pocket/error.h"

namespace pocket {

std::vector<std::string> linked_devices() { return {"cpu"}; }

std::unique_ptr<Device> make_device(const std::string& name, int num_threads) {
    if (name == "auto" || name == "cpu") return std::make_unique<CpuDevice>(num_threads);
    throw Error(ErrorKind::unsupported,
                "device: '" + name + "' is not in this build, which has cpu; use device 'cpu', or build with -DPOCKET_BACKEND for another", "device");
}

}  // namespace pocket
