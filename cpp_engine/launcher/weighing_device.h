// A device that a model is laid out on to learn what it takes: it keeps sizes in place of weights, and computes nothing.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "pocket/device.h"

namespace pocket::launcher {

class WeighingDevice final : public Device {
public:
    explicit WeighingDevice(DeviceInfo info) : info_(std::move(info)) {}

    DeviceInfo info() const override { return info_; }
    std::unique_ptr<Buffer> allocate(std::size_t num_bytes) override;
    void upload(void* to, const void* from, std::size_t num_bytes) override;
    void download(void* to, const void* from, std::size_t num_bytes) override;
    void copy(void* to, const void* from, std::size_t num_bytes) override;
    void synchronize() override {}
    std::unique_ptr<Matrix> load_matrix(std::span<const MatrixPart> parts, DType dtype) override;  // looks at no value
    void reserve(int, int) override {}

    // Error(unsupported), all of them.
    void embed(const Step&, const Matrix&, const Tensor&) override { refuse(); }
    void linear(const Tensor&, const Norm*, const Matrix&, Epilogue, const Tensor&) override { refuse(); }
    void attention(const Step&, const AttentionShape&, const AttentionWeights&, const Tensor&, const KvCache&, const Tensor&) override { refuse(); }
    void delta_net(const Step&, const DeltaNetShape&, const DeltaNetWeights&, const Tensor&, const StateCache&, const Tensor&) override { refuse(); }
    void take_samples(const Step&, const Tensor&, const Tensor&) override { refuse(); }
    void sample(const Tensor&, const SampleInputs&, std::span<SampleOutput>) override { refuse(); }

private:
    [[noreturn]] static void refuse();

    DeviceInfo info_;
};

}  // namespace pocket::launcher
