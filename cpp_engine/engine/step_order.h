// A step as the bytes that rank 0 sends, and on the other ranks as rows again. An order is whole in itself: it hangs on none before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/request.h"
#include "engine/runner.h"

namespace pocket {

enum class OrderKind : std::uint8_t {
    stop,    // there are no more orders
    run,     // Runner::run
    logits,  // Runner::logits
};

// The order for `rows`; of `mask` words there are ceil(vocab_size / 32).
std::vector<std::byte> write_order(OrderKind kind, std::span<const RunRow> rows, std::span<const StateCopy> copies, int vocab_size);

// What was written, in all that a runner reads. The rows point into it.
class StepOrder {
public:
    StepOrder(std::span<const std::byte> bytes, int vocab_size);
    StepOrder(const StepOrder&) = delete;
    StepOrder& operator=(const StepOrder&) = delete;

    OrderKind kind() const noexcept { return kind_; }
    std::span<const RunRow> rows() const noexcept { return rows_; }
    std::span<const StateCopy> copies() const noexcept { return copies_; }

private:
    struct Owned {
        std::vector<std::int32_t> token_ids, block_table, ranked;
        std::vector<TokenLogprobs> found;                   // which rank 0 alone has
        std::vector<std::uint32_t> mask;
        Request request;
    };

    OrderKind kind_ = OrderKind::stop;
    std::vector<std::unique_ptr<Owned>> owned_;
    std::vector<RunRow> rows_;
    std::vector<StateCopy> copies_;
};

}  // namespace pocket
