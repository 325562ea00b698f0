#include "backends/cpu/cpu_device.h"
#ifdef POCKET_CUDA
#include "backends/cuda/make_device.h"
#endif
#include "pocket/device.h"
#include "pocket/error.h"

namespace pocket {

std::vector<std::string> linked_devices() {
#ifdef POCKET_CUDA
    if (cuda::num_devices() > 0) return {"cuda", "cpu"};
#endif
    return {"cpu"};
}

std::unique_ptr<Device> make_device(const std::string& name, int num_threads) {
#ifdef POCKET_CUDA
    if (name == "cuda" || (name == "auto" && cuda::num_devices() > 0)) return cuda::make_device(0);
    if (name.starts_with("cuda:") && name.size() > 5 && name.size() < 9 && name.find_first_not_of("0123456789", 5) == std::string::npos) {
        return cuda::make_device(std::stoi(name.substr(5)));
    }
#endif
    if (name == "auto" || name == "cpu") return std::make_unique<CpuDevice>(num_threads);
    throw Error(ErrorKind::unsupported,
                "device: '" + name + "' is not in this build, which has cpu; use device 'cpu', or build with -DPOCKET_BACKEND for another", "device");
}

}  // namespace pocket
