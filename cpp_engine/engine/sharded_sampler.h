// Draws over ranks that each have the logits of some ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "models/model.h"
#include "pocket/communicator.h"
#include "pocket/device.h"

namespace pocket {

// Ranks tell each other sums of exponentials and their most likely ids, and rank 0 draws as Device::sample does: the most likely ids of all are among those of
// each rank. Only a row whose draw reaches beyond its candidates, or whose terms change its logits, is gathered whole, as all are on a device that can't
// summarize.
// Every rank makes the same calls, with the same rows. Device and ranks must outlive it.
class ShardedSampler {
public:
    ShardedSampler(Device& device, Communicator& ranks, int vocab_size, const LogitShare& share);

    // One output a row of `logits` [num_samples, ids of this rank], whose masks and edits are those of the whole vocabulary. `changes`: which rows may have
    // edits or a min_p, which rank 0 alone has. On the other ranks than 0 nothing is written.
    void sample(const Tensor& logits, const SampleInputs& inputs, std::span<SampleOutput> outputs, const std::vector<bool>& changes);

    // The logits [num_samples, vocab_size] of all ranks, in memory of this that is valid until the next call.
    Tensor whole(const Tensor& logits);

private:
    struct Row;

    std::vector<std::size_t> draw(const Tensor& logits, const SampleInputs& inputs, std::span<SampleOutput> outputs, const std::vector<bool>& changes);
    void draw_whole(const Tensor& logits, const SampleInputs& inputs, const std::vector<std::size_t>& places, std::span<SampleOutput> outputs);
    int num_candidates(const SampleInputs& inputs, std::size_t place) const;
    bool may_need_all(const SampleInputs& inputs, std::size_t place) const;
    std::byte* room(std::unique_ptr<Buffer>& buffer, std::size_t num_bytes);

    Device& device_;
    Communicator& ranks_;
    int vocab_size_;
    LogitShare share_;
    std::vector<int> firsts_;                               // of each rank its first id, then vocab_size
    std::unique_ptr<Buffer> own_, parts_, whole_;           // [rows, widest], [ranks, rows, widest] and [rows, vocab_size] float32
};

}  // namespace pocket
