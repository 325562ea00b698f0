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
    const std::string asked = "\"device\" = \"" + name + "\" ";
    if (!name.starts_with("cuda")) throw Error(ErrorKind::unsupported, asked + "is no device of the native engine: send \"cpu\", \"cuda\", \"cuda:N\" or \"auto\".", "device");
#ifdef POCKET_CUDA
    throw Error(ErrorKind::unsupported, asked + "names no GPU: send \"cuda\" or \"cuda:N\", N the number of a GPU.", "device");
#else
    throw Error(ErrorKind::unsupported,
                asked + "is not in this build of the native engine, which computes on the CPU alone: build it with POCKET_BACKEND=cuda, or send \"cpu\" or backend \"torch\".",
                "device");
#endif
}

}  // namespace pocket
