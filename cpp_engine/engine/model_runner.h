// Runs scheduled rows through a model: step inputs, forward, draws. Owns the KV cache and the recurrent states.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/runner.h"
#include "engine/sharded_sampler.h"
#include "models/model.h"
#include "pocket/communicator.h"
#include "pocket/device.h"

namespace pocket {

// Device, model and ranks must outlive it.
class ModelRunner final : public Runner {
public:
    // Allocates the caches, and room for steps of `max_step_tokens` tokens; longer ones make more room when they come. `kv_cache_dtype`: float32, float16 or
    // bfloat16. Then computes one token, so that what the device does not compute is refused here and not at the first request.
    // `ranks`: those that share the model, or null for one. All of them make every call; the draws of rank 0 alone mean something.
    // Error(device) with the figures where the memory is too small; Error(unsupported) naming the shape or type that the device lacks.
    ModelRunner(Device& device, Model& model, const CacheShape& shape, DType kv_cache_dtype, int max_step_tokens, Communicator* ranks = nullptr);

    int vocab_size() const noexcept override { return model_.vocab_size(); }
    const CacheShape& cache() const noexcept override { return shape_; }
    std::vector<Draw> run(std::span<const RunRow> rows, std::span<const StateCopy> copies) override;
    std::vector<float> logits(const RunRow& row, std::span<const StateCopy> copies) override;

private:
    void allocate_kv(DType dtype);
    void allocate_states();
    void try_step();
    void copy_states(std::span<const StateCopy> copies);
    void reserve(int num_tokens, int num_samples);
    Step upload(std::span<const RunRow> rows, std::span<const std::size_t> order, bool samples_all, int padded_rows = 0, int padded_blocks = 0);
    Tensor decode(std::span<const RunRow> rows, std::span<const std::size_t> order);
    void record(const std::pair<int, int>& size, const Step& step);
    void rank(Step step, std::span<const RunRow> rows, std::span<const std::size_t> order);
    void draw(const Tensor& logits, const SampleInputs& inputs, std::span<SampleOutput> outputs, const std::vector<bool>& changes);
    std::vector<Draw> sample(const Tensor& logits, std::span<const RunRow> rows, std::span<const std::size_t> order);

    Device& device_;
    Model& model_;
    CacheShape shape_;
    std::optional<ShardedSampler> shared_;                  // where ranks share the model
    std::unique_ptr<Buffer> kv_, states_;                   // of all layers
    std::vector<KvCache> kv_layers_;
    std::vector<StateCache> state_layers_;
    std::size_t slot_bytes_ = 0;                            // from the state of a slot to that of the next
    int max_tokens_ = 0, max_samples_ = 0;                  // that the model has room for
    std::vector<std::int32_t> inputs_;                      // a step's arrays, one behind the other, as they are uploaded
    std::unique_ptr<Buffer> device_inputs_;
    const std::int32_t* ranked_tokens_ = nullptr;           // in device_inputs_: tokens of the uploaded step by whose logits others are ranked

    // Steps of rows that all decode, recorded for a number of rows and of blocks a row; smaller ones are padded. They hold addresses of the model and of
    // device_inputs_, so all go when one of these grows.
    struct Recorded {
        std::unique_ptr<Graph> graph;
        Tensor logits;
    };
    bool has_graphs_ = false;
    std::map<std::pair<int, int>, Recorded> graphs_;
};

}  // namespace pocket
