#include "engine/ranked_runner.h"

#include <exception>

#include "engine/step_order.h"

namespace pocket {

namespace {

// `work`, whose failure the others hear of: they wait for this rank.
auto or_abort(Communicator& ranks, auto&& work) {
    try {
        return work();
    } catch (const std::exception& error) {
        ranks.abort(error.what());
        throw;
    }
}

}  // namespace

std::vector<Draw> LeadingRunner::run(std::span<const RunRow> rows, std::span<const StateCopy> copies) {
    return or_abort(ranks_, [&] {
        std::vector<std::byte> order = write_order(OrderKind::run, rows, copies, vocab_size());
        ranks_.broadcast(order);
        std::vector<Draw> draws = inner_.run(rows, copies);
        ranks_.check();
        return draws;
    });
}

std::vector<float> LeadingRunner::logits(const RunRow& row, std::span<const StateCopy> copies) {
    return or_abort(ranks_, [&] {
        static const Request none;  // a session's row for logits has no terms of its own
        RunRow told = row;
        if (told.request == nullptr) told.request = &none;
        std::vector<std::byte> order = write_order(OrderKind::logits, {&told, 1}, copies, vocab_size());
        ranks_.broadcast(order);
        std::vector<float> values = inner_.logits(row, copies);
        ranks_.check();
        return values;
    });
}

void LeadingRunner::dismiss() {
    std::vector<std::byte> order = write_order(OrderKind::stop, {}, {}, vocab_size());
    ranks_.broadcast(order);
}

void follow(Runner& inner, Communicator& ranks) {
    or_abort(ranks, [&] {
        std::vector<std::byte> bytes;
        for (;;) {
            ranks.broadcast(bytes);
            const StepOrder order(bytes, inner.vocab_size());
            if (order.kind() == OrderKind::stop) return;
            if (order.kind() == OrderKind::run) inner.run(order.rows(), order.copies());
            if (order.kind() == OrderKind::logits) inner.logits(order.rows()[0], order.copies());
        }
    });
}

}  // namespace pocket
