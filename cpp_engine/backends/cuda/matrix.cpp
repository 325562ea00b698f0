#include "backends/cuda/matrix.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "backends/cuda/call.h"
#include "core/cores.h"
#include "pocket/error.h"

namespace pocket::cuda {

namespace {

constexpr std::size_t align(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

constexpr unsigned long long kNoneBad = ~0ull;
constexpr std::size_t kSpareBytes = 16 << 20;               // of memory, which is given out in pieces

[[noreturn]] void refuse(const HostTensor& tensor, const std::string& what) { throw Error(ErrorKind::configuration, tensor.file + ": " + tensor.name + " " + what); }

void check(const MatrixPart& part, std::int64_t columns) {
    const HostTensor& weight = *part.weight;
    if (weight.shape.size() != 2) refuse(weight, "is not a matrix; the checkpoint is not of the model that its config names");
    if (weight.shape[1] != columns)
        refuse(weight, "has " + std::to_string(weight.shape[1]) + " columns and the weights beside it " + std::to_string(columns) + "; the checkpoint is not of the model that its config names");
    if (weight.dtype == DType::int32) refuse(weight, "holds int32, not weights; the checkpoint is not of the model that its config names");
    if (weight.dtype != DType::float8_e4m3) return;
    if (!part.scales) throw Error(ErrorKind::configuration, weight.file + ": " + weight.name + "_scale_inv is missing, and float8_e4m3 means nothing without it; get the whole checkpoint");
    const std::vector<std::int64_t> wanted = {(weight.shape[0] + 127) / 128, (columns + 127) / 128};
    if (part.scales->shape != wanted)
        refuse(*part.scales, "is not [" + std::to_string(wanted[0]) + ", " + std::to_string(wanted[1]) + "], one scale a block of 128x128; only such blocks are supported");
}

// `found` as convert_values leaves it.
void check_values(const HostTensor& tensor, unsigned long long found, std::int64_t columns, DType dtype) {
    if (found == kNoneBad) return;
    const auto at = static_cast<std::int64_t>(found / 2);
    const std::string place = " at [" + std::to_string(at / columns) + ", " + std::to_string(at % columns) + "]";
    if (found % 2) refuse(tensor, std::string("has a value that is too large for ") + name(dtype) + place + "; use dtype float32, or bfloat16 where the GPU has it");
    refuse(tensor, "has a value that is NaN or infinite" + place + "; the checkpoint is damaged, get it again");
}

void check_room(const DeviceInfo& device, const HostTensor& tensor, std::size_t num_bytes) {
    if (num_bytes + kSpareBytes <= device.free_memory) return;  // then it is something else
    const auto mebibytes = [](std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
    throw Error(ErrorKind::device,
                "The weights do not fit into the memory of " + device.name + ": " + mebibytes(device.free_memory) + " of " + mebibytes(device.total_memory) + " are free, and " +
                    tensor.name + " takes " + mebibytes(num_bytes) + ". Use a GPU with more memory, a checkpoint in FP8, or device \"cpu\".",
                "model");
}

// `bytes` of a tensor's values from byte `first` on. Reads take less of the system than touching the pages of a mapping does.
void read(const HostTensor& tensor, std::size_t first, std::byte* to, std::size_t bytes) {
    if (tensor.descriptor < 0) {
        std::memcpy(to, tensor.data + first, bytes);
        return;
    }
    std::int64_t at = tensor.offset + static_cast<std::int64_t>(first);
    while (bytes > 0) {
        const ssize_t count = pread(tensor.descriptor, to, bytes, at);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            const std::string why = count < 0 ? " can't be read (" + std::generic_category().message(errno) + ")" : " became shorter while it was loaded";
            throw Error(ErrorKind::configuration, tensor.file + why + ": check the file, or download it again.", "model");
        }
        to += count, at += count, bytes -= static_cast<std::size_t>(count);
    }
}

}  // namespace

void MatrixLoader::release() noexcept {
    for (Lane& lane : lanes_) {
        if (lane.stream) cudaStreamSynchronize(lane.stream), cudaStreamDestroy(lane.stream);
        for (cudaEvent_t event : lane.sent)
            if (event) cudaEventDestroy(event);
        if (lane.pinned) cudaFreeHost(lane.pinned);
    }
    lanes_.clear();
    threads_.reset();
}

void MatrixLoader::prepare() {
    if (threads_) return;
    auto threads = std::make_unique<ThreadPool>(std::min(kMostLanes, available_cores()));
    lanes_.resize(static_cast<std::size_t>(threads->size()));
    try {
        for (Lane& lane : lanes_) {
            call(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking), "a stream");
            call(cudaHostAlloc(reinterpret_cast<void**>(&lane.pinned), 2 * kPieceBytes, cudaHostAllocDefault), "pinned memory for loading");
            for (cudaEvent_t& event : lane.sent) call(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
            lane.arrived = device_.allocate(2 * kPieceBytes);
        }
    } catch (...) {
        release();
        throw;
    }
    threads_ = std::move(threads);
}

void MatrixLoader::cut(std::vector<Piece>& pieces, const HostTensor& tensor, void* to, DType dtype, unsigned long long* first_bad) {
    const std::int64_t most = static_cast<std::int64_t>(kPieceBytes / item_size(tensor.dtype)), count = tensor.num_elements();
    for (std::int64_t first = 0; first < count; first += most)
        pieces.push_back({&tensor, first, std::min(most, count - first), static_cast<std::byte*>(to) + first * static_cast<std::int64_t>(item_size(dtype)), dtype, first_bad});
}

void MatrixLoader::send(const Context& context, const Piece& piece, Lane& lane) {
    const HostTensor& tensor = *piece.tensor;
    const std::size_t item = item_size(tensor.dtype), at = static_cast<std::size_t>(lane.turn) * kPieceBytes, bytes = static_cast<std::size_t>(piece.count) * item;
    std::byte *pinned = lane.pinned + at, *arrived = static_cast<std::byte*>(lane.arrived->data()) + at;
    call(cudaEventSynchronize(lane.sent[lane.turn]), "loading");
    read(tensor, static_cast<std::size_t>(piece.first) * item, pinned, bytes);
    call(cudaMemcpyAsync(arrived, pinned, bytes, cudaMemcpyHostToDevice, lane.stream), "loading");
    Context own = context;
    own.stream = lane.stream;
    convert_values(own, arrived, tensor.dtype, piece.to, piece.dtype, piece.first, piece.count, piece.first_bad);
    call(cudaEventRecord(lane.sent[lane.turn], lane.stream), "loading");
    lane.turn ^= 1;
}

void MatrixLoader::send(const Context& context, std::span<const Piece> pieces) {
    int ordinal = 0;
    call(cudaGetDevice(&ordinal), "the choice of the device");
    call(cudaStreamSynchronize(context.stream), "loading");  // what the pieces go to is zeroed there
    const auto wait = [&] {
        cudaError_t status = cudaSuccess;
        for (const Lane& lane : lanes_)
            if (const cudaError_t one = cudaStreamSynchronize(lane.stream); one != cudaSuccess) status = one;
        return status;
    };
    try {
        threads_->parallel_for(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t begin, std::int64_t end, int thread) {
            call(cudaSetDevice(ordinal), "the choice of the device");
            for (; begin < end; ++begin) send(context, pieces[static_cast<std::size_t>(begin)], lanes_[static_cast<std::size_t>(thread)]);
        });
    } catch (...) {
        wait();                                             // before what they write to is freed
        throw;
    }
    call(wait(), "loading");
}

std::unique_ptr<Matrix> MatrixLoader::load(const Context& context, std::span<const MatrixPart> parts, DType dtype) {
    if (parts.empty()) throw Error(ErrorKind::configuration, "cuda: a matrix of no weights");
    if (dtype != DType::float32 && dtype != DType::float16 && dtype != DType::bfloat16)
        throw Error(ErrorKind::unsupported, std::string("dtype: weights can't be held as ") + name(dtype) + "; use float32, float16 or bfloat16", "dtype");
    prepare();
    const std::int64_t columns = parts.front().weight->shape.empty() ? 0 : parts.front().weight->shape.back();
    std::vector<Segment> segments;
    std::int64_t rows = 0;
    for (const MatrixPart& part : parts) {
        check(part, columns);
        const DType stored = part.weight->dtype == DType::float8_e4m3 ? DType::float8_e4m3 : dtype;
        const std::int64_t height = part.weight->shape[0];
        // Blocks of scales go on across parts only where the part above ends with a whole block.
        const bool joins = !segments.empty() && segments.back().dtype == stored && (stored != DType::float8_e4m3 || segments.back().rows % 128 == 0);
        if (joins) {
            segments.back().rows += height;
        } else {
            Segment segment;
            segment.dtype = stored, segment.rows = height, segment.first_row = rows, segment.scale_stride = static_cast<int>((columns + 127) / 128);
            segments.push_back(segment);
        }
        rows += height;
    }
    const auto value_bytes = [&](const Segment& segment) { return align(static_cast<std::size_t>(segment.rows * columns) * item_size(segment.dtype)); };
    const auto scale_bytes = [&](const Segment& segment) {
        return segment.dtype == DType::float8_e4m3 ? align(sizeof(float) * static_cast<std::size_t>((segment.rows + 127) / 128 * segment.scale_stride)) : 0;
    };
    std::size_t num_bytes = 0;
    for (const Segment& segment : segments) num_bytes += value_bytes(segment) + scale_bytes(segment);
    // Behind the weights, for each part: what is wrong with its values, and with its scales.
    std::vector<unsigned long long> found(2 * parts.size(), kNoneBad);
    const std::size_t all_bytes = num_bytes + align(sizeof(found[0]) * found.size());
    std::unique_ptr<Buffer> memory;
    try {
        memory = device_.allocate(all_bytes);
    } catch (const Error&) {
        check_room(device_.info(), *parts.front().weight, all_bytes);
        throw;
    }
    auto* first_bad = reinterpret_cast<unsigned long long*>(static_cast<std::byte*>(memory->data()) + num_bytes);
    device_.upload(first_bad, found.data(), sizeof(found[0]) * found.size());
    std::byte* next = static_cast<std::byte*>(memory->data());
    for (Segment& segment : segments) {
        segment.values = next;
        next += value_bytes(segment);
        if (segment.dtype == DType::float8_e4m3) segment.scales = reinterpret_cast<const float*>(next);
        next += scale_bytes(segment);
    }
    std::vector<Piece> pieces;
    std::int64_t row = 0;
    std::size_t at = 0;
    for (std::size_t index = 0; index < parts.size(); ++index) {
        while (row >= segments[at].first_row + segments[at].rows) ++at;
        const Segment& segment = segments[at];
        const std::int64_t within = row - segment.first_row;
        auto* values = static_cast<std::byte*>(const_cast<void*>(segment.values)) + within * columns * static_cast<std::int64_t>(item_size(segment.dtype));
        cut(pieces, *parts[index].weight, values, segment.dtype, first_bad + 2 * index);
        if (segment.dtype == DType::float8_e4m3)
            cut(pieces, *parts[index].scales, const_cast<float*>(segment.scales) + within / 128 * segment.scale_stride, DType::float32, first_bad + 2 * index + 1);
        row += parts[index].weight->shape[0];
    }
    send(context, pieces);
    device_.download(found.data(), first_bad, sizeof(found[0]) * found.size());
    for (std::size_t index = 0; index < parts.size(); ++index) {
        check_values(*parts[index].weight, found[2 * index], columns, dtype);
        if (parts[index].scales) check_values(*parts[index].scales, found[2 * index + 1], (columns + 127) / 128, DType::float32);
    }
    const DType kind = segments.front().dtype;
    return std::make_unique<CudaMatrix>(rows, columns, kind, std::move(memory), std::move(segments), num_bytes);
}

}  // namespace pocket::cuda
