#include "backends/cuda/matrix.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "backends/cuda/call.h"

namespace pocket::cuda {

namespace {

constexpr std::size_t align(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

constexpr unsigned long long kNoneBad = ~0ull;

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

}  // namespace

MatrixLoader::~MatrixLoader() {
    for (cudaEvent_t event : sent_)
        if (event) cudaEventDestroy(event);
    if (pinned_) cudaFreeHost(pinned_);
}

void MatrixLoader::prepare() {
    if (arrived_) return;
    call(cudaHostAlloc(reinterpret_cast<void**>(&pinned_), 2 * kPieceBytes, cudaHostAllocDefault), "pinned memory for loading");
    for (cudaEvent_t& event : sent_) call(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
    arrived_ = device_.allocate(2 * kPieceBytes);
}

void MatrixLoader::send(const Context& context, const HostTensor& tensor, void* to, DType dtype, unsigned long long* first_bad) {
    const std::size_t from_size = item_size(tensor.dtype), to_size = item_size(dtype);
    const std::int64_t piece = static_cast<std::int64_t>(kPieceBytes / from_size), count = tensor.num_elements();
    for (std::int64_t first = 0; first < count; first += piece, turn_ ^= 1) {
        const std::int64_t number = std::min(piece, count - first);
        const std::size_t bytes = static_cast<std::size_t>(number) * from_size;
        std::byte* pinned = pinned_ + turn_ * kPieceBytes;
        std::byte* arrived = static_cast<std::byte*>(arrived_->data()) + turn_ * kPieceBytes;
        call(cudaEventSynchronize(sent_[turn_]), "loading");
        std::memcpy(pinned, tensor.data + first * static_cast<std::int64_t>(from_size), bytes);
        call(cudaMemcpyAsync(arrived, pinned, bytes, cudaMemcpyHostToDevice, context.stream), "loading");
        convert_values(context, arrived, tensor.dtype, static_cast<std::byte*>(to) + first * static_cast<std::int64_t>(to_size), dtype, first, number, first_bad);
        call(cudaEventRecord(sent_[turn_], context.stream), "loading");
    }
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
    std::unique_ptr<Buffer> memory = device_.allocate(num_bytes + align(sizeof(found[0]) * found.size()));
    auto* first_bad = reinterpret_cast<unsigned long long*>(static_cast<std::byte*>(memory->data()) + num_bytes);
    device_.upload(first_bad, found.data(), sizeof(found[0]) * found.size());
    std::byte* next = static_cast<std::byte*>(memory->data());
    for (Segment& segment : segments) {
        segment.values = next;
        next += value_bytes(segment);
        if (segment.dtype == DType::float8_e4m3) segment.scales = reinterpret_cast<const float*>(next);
        next += scale_bytes(segment);
    }
    std::int64_t row = 0;
    std::size_t at = 0;
    for (std::size_t index = 0; index < parts.size(); ++index) {
        while (row >= segments[at].first_row + segments[at].rows) ++at;
        const Segment& segment = segments[at];
        const std::int64_t within = row - segment.first_row;
        auto* values = static_cast<std::byte*>(const_cast<void*>(segment.values)) + within * columns * static_cast<std::int64_t>(item_size(segment.dtype));
        send(context, *parts[index].weight, values, segment.dtype, first_bad + 2 * index);
        if (segment.dtype == DType::float8_e4m3)
            send(context, *parts[index].scales, const_cast<float*>(segment.scales) + within / 128 * segment.scale_stride, DType::float32, first_bad + 2 * index + 1);
        row += parts[index].weight->shape[0];
    }
    device_.download(found.data(), first_bad, sizeof(found[0]) * found.size());
    for (std::size_t index = 0; index < parts.size(); ++index) {
        check_values(*parts[index].weight, found[2 * index], columns, dtype);
        if (parts[index].scales) check_values(*parts[index].scales, found[2 * index + 1], (columns + 127) / 128, DType::float32);
    }
    const DType kind = segments.front().dtype;
    return std::make_unique<CudaMatrix>(rows, columns, kind, std::move(memory), std::move(segments), num_bytes);
}

}  // namespace pocket::cuda
