// A checkpoint's tensors as a model takes them, under Hugging Face's names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "core/share.h"
#include "io/checkpoint.h"
#include "pocket/device.h"

namespace pocket {

class Weights {
public:
    // Of rank `share`, the whole of which is all. The checkpoint must outlive this. Error(unsupported) as check_quantization has it.
    explicit Weights(Checkpoint& checkpoint, const Share& share = {});

    Checkpoint& checkpoint() noexcept { return checkpoint_; }
    const Share& share() const noexcept { return share_; }

    // The matrix `name` [rows, columns], and the scales of its blocks where it is FP8. Error(configuration) naming file and tensor where one of the two is
    // missing, or has another shape or type. The values are not looked at: Device::load_matrix does that.
    MatrixPart matrix(const std::string& name, std::int64_t rows, std::int64_t columns);

    // Parts of `whole`, which `matrix` returned: some rows; this rank's equal share of the `count` rows from `first` on; its share of the columns. Nothing of the
    // others is read. They last until `forget_parts`. Error(unsupported) naming file, tensor and number of ranks where FP8 blocks would be cut, the same on
    // every rank.
    MatrixPart rows(const MatrixPart& whole, const Range& rows);
    MatrixPart share_rows(const MatrixPart& whole, std::int64_t first, std::int64_t count);
    MatrixPart share_columns(const MatrixPart& whole);
    void forget_parts() noexcept { parts_.clear(); }

    // The values of the tensor `name` in float32. Error(configuration) naming file and tensor where it is missing, or has another shape or type, or a value
    // is NaN or infinite.
    std::vector<float> floats(const std::string& name, const std::vector<std::int64_t>& shape);

private:
    // A tensor of its own, whose values are those of a checkpoint's or copies.
    struct Part {
        HostTensor tensor;
        std::vector<std::byte> copies;
    };

    const HostTensor& cut_rows(const HostTensor& whole, const Range& rows);
    const HostTensor& cut_columns(const HostTensor& whole, const Range& columns);
    void check_cut(const HostTensor& whole, const char* what, const Range& part) const;

    Checkpoint& checkpoint_;
    Share share_;
    std::list<Part> parts_;                                 // whose addresses MatrixParts hold
};

}  // namespace pocket
