#include "backends/cuda/cuda_device.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "backends/cuda/call.h"

namespace pocket::cuda {

namespace {

class CudaBuffer : public Buffer {
public:
    CudaBuffer(void* data, std::size_t num_bytes) { data_ = data, num_bytes_ = num_bytes; }
    ~CudaBuffer() override { cudaFree(data_); }
};

class CudaGraph : public Graph {
public:
    CudaGraph(cudaGraphExec_t graph, cudaStream_t stream) : graph_(graph), stream_(stream) {}
    ~CudaGraph() override { cudaGraphExecDestroy(graph_); }
    void replay() override { call(cudaGraphLaunch(graph_, stream_), "a graph"); }

private:
    cudaGraphExec_t graph_;
    cudaStream_t stream_;                                   // the device's, which outlives this
};

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::unsupported, message, "device"); }

constexpr std::size_t kSentBytes = 4 << 20;                 // of pinned memory for uploads
constexpr std::size_t kKeptBytes = 512 << 20;               // that caches leave to recorded graphs, and to steps of more rows than the first ones had

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

int num_devices() noexcept {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();  // no driver is no error of a later call
    return 0;
}

std::unique_ptr<Device> make_device(int ordinal) {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    cudaGetLastError();  // no driver is no error of a later call
    const std::string asked = "\"device\" = \"cuda:" + std::to_string(ordinal) + "\" is not there: ";
    if (status != cudaSuccess) refuse(asked + "CUDA says \"" + cudaGetErrorString(status) + "\". Check the NVIDIA driver (nvidia-smi), or send \"cpu\".");
    if (ordinal < 0 || ordinal >= count) refuse(asked + "this process sees " + std::to_string(count) + (count == 1 ? " GPU" : " GPUs") + ". Send \"cuda\" for the first one, or \"cpu\".");
    return std::make_unique<CudaDevice>(ordinal);
}

void* Scratch::take(std::size_t num_bytes) {
    if (buffer_ && buffer_->num_bytes() >= num_bytes) return buffer_->data();
    const std::size_t wanted = buffer_ ? std::max(num_bytes, buffer_->num_bytes() * 5 / 4) : num_bytes;
    if (keeps_old_ && buffer_) old_.push_back(std::move(buffer_));
    buffer_.reset();
    buffer_ = device_.allocate(wanted);
    return buffer_->data();
}

CudaDevice::CudaDevice(int ordinal)
    : ordinal_(ordinal), prepared_(*this), partial_(*this), both_(*this), expanded_(*this), workspace_(*this), mixed_(*this), read_(*this), queries_(*this),
      tickets_(*this), draws_(*this), drawn_(*this), changed_(*this), masks_(*this), loader_(*this) {
    cudaDeviceProp properties = {};
    call(cudaGetDeviceProperties(&properties, ordinal), "the device's properties");
    context_.num_multiprocessors = properties.multiProcessorCount;
    context_.capability = 10 * properties.major + properties.minor;
    context_.shared_memory = static_cast<int>(properties.sharedMemPerBlockOptin);
    both_bytes_ = std::max<std::int64_t>(64 << 20, static_cast<std::int64_t>(properties.totalGlobalMem / 224));
    description_ = std::string(properties.name) + ", " + std::to_string(properties.multiProcessorCount) + " multiprocessors, compute capability " +
                   std::to_string(properties.major) + "." + std::to_string(properties.minor);
    const std::string asked = "\"device\" = \"cuda:" + std::to_string(ordinal) + "\" (" + description_ + ") ";
    if (context_.capability < 75) refuse(asked + "is older than Turing, compute capability 7.5: send \"cpu\", or use a newer GPU.");
    use();
    if (!has_code()) {
        refuse(asked + "has no code in this build, which is for " POCKET_CUDA_ARCHITECTURES ": build it again without CUDAARCHS, or with CUDAARCHS=" +
               std::to_string(context_.capability) + (context_.capability == 90 ? "a" : "") + "-real, or send \"cpu\".");
    }
    call(cudaStreamCreateWithFlags(&context_.stream, cudaStreamNonBlocking), "a stream");
    try {
        wide_ = std::make_unique<WideProduct>();
    } catch (...) {
        cudaStreamDestroy(context_.stream);
        throw;
    }
}

CudaDevice::~CudaDevice() {
    cudaSetDevice(ordinal_);
    cudaStreamSynchronize(context_.stream);
    if (pinned_) cudaFreeHost(pinned_);
    if (sent_) cudaFreeHost(sent_);
    wide_.reset();
    cudaStreamDestroy(context_.stream);
}

void CudaDevice::use() const { call(cudaSetDevice(ordinal_), "the choice of the device"); }

DeviceInfo CudaDevice::info() const {
    use();
    DeviceInfo info;
    info.name = "cuda:" + std::to_string(ordinal_);
    info.description = description_;
    info.activation_dtype = info.kv_cache_dtype = context_.capability >= 80 ? DType::bfloat16 : DType::float16;
    info.cache_share = 0.95;
    info.kept_memory = kKeptBytes;
    info.default_rows = 64;
    info.warms_up = true;
    call(cudaMemGetInfo(&info.free_memory, &info.total_memory), "the device's memory");
    return info;
}

std::unique_ptr<Buffer> CudaDevice::allocate(std::size_t num_bytes) {
    use();
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, std::max<std::size_t>(num_bytes, 1));
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // the device goes on
        std::size_t free = 0, total = 0;
        call(cudaMemGetInfo(&free, &total), "the device's memory");
        throw Error(ErrorKind::device, "cuda:" + std::to_string(ordinal_) + " has no " + mebibytes(num_bytes) + " in one piece: " + mebibytes(free) + " of " + mebibytes(total) +
                                           " are free. Lower kv_cache_memory, prefill_chunk_tokens or max_batch_size, or end what else uses the GPU.");
    }
    call(status, "an allocation");
    auto buffer = std::make_unique<CudaBuffer>(data, num_bytes);
    call(cudaMemsetAsync(data, 0, num_bytes, context_.stream), "an allocation");
    return buffer;
}

// A step's arrays go through pinned memory, which is used again once all of it was read; from pageable memory the runtime takes a copy before it returns.
void CudaDevice::upload(void* to, const void* from, std::size_t num_bytes) {
    use();
    if (num_bytes <= kSentBytes / 2) {
        if (!sent_) call(cudaHostAlloc(reinterpret_cast<void**>(&sent_), kSentBytes, cudaHostAllocDefault), "pinned memory for uploads");
        if (sent_bytes_ + num_bytes > kSentBytes) synchronize(), sent_bytes_ = 0;
        from = std::memcpy(sent_ + sent_bytes_, from, num_bytes);
        sent_bytes_ += (num_bytes + 63) / 64 * 64;
    }
    call(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyHostToDevice, context_.stream), "an upload");
}

void CudaDevice::download(void* to, const void* from, std::size_t num_bytes) {
    call(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToHost, context_.stream), "a download");
    synchronize();
}

void CudaDevice::copy(void* to, const void* from, std::size_t num_bytes) {
    call(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, context_.stream), "a copy");
}

void CudaDevice::synchronize() { call(cudaStreamSynchronize(context_.stream), "a step"); }

std::unique_ptr<Matrix> CudaDevice::load_matrix(std::span<const MatrixPart> parts, DType dtype) {
    use();
    return loader_.load(context_, parts, dtype);
}

// Sizes of a model are not known here: the other scratch grows with the first step of each size.
void CudaDevice::reserve(int max_tokens, int max_rows) {
    use();
    (void)max_tokens;
    loader_.release();                                      // weights came before steps
    tickets(static_cast<std::size_t>(max_rows) * 64);
    workspace_.take(WideProduct::kWorkspaceBytes);
}

// As one kernel; null where that does not compute it.
std::unique_ptr<Graph> CudaDevice::record_step(const std::function<void()>& work) {
    StepRecorder recorder(context_, *this);
    recorder_ = &recorder;
    try {
        work();
    } catch (...) {
        recorder_ = nullptr;
        throw;
    }
    recorder_ = nullptr;
    return recorder.finish();
}

std::unique_ptr<Graph> CudaDevice::capture(const std::function<void()>& work) {
    use();
    if (auto step = record_step(work)) return step;
    for (Scratch* scratch : {&prepared_, &partial_, &both_, &expanded_, &workspace_, &mixed_, &read_, &queries_, &tickets_, &draws_, &drawn_, &masks_}) scratch->keep_old();
    cudaGraph_t graph = nullptr;
    call(cudaStreamBeginCapture(context_.stream, cudaStreamCaptureModeThreadLocal), "a capture");
    try {
        work();
    } catch (...) {
        cudaStreamEndCapture(context_.stream, &graph);
        if (graph) cudaGraphDestroy(graph);
        cudaGetLastError();  // of the capture that was broken off
        throw;
    }
    call(cudaStreamEndCapture(context_.stream, &graph), "a capture");
    cudaGraphExec_t executable = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    call(status, "a graph's start");
    return std::make_unique<CudaGraph>(executable, context_.stream);
}

int* CudaDevice::tickets(std::size_t count) { return static_cast<int*>(tickets_.take(sizeof(int) * std::max<std::size_t>(count, 16384))); }

}  // namespace pocket::cuda
