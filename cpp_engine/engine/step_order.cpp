#include "engine/step_order.h"

#include <cstring>
#include <stdexcept>

namespace pocket {

namespace {

// A row's part of an order, before its tokens, its blocks, the tokens that it ranks and its mask.
struct RowLine {
    std::uint64_t seed;
    std::uint32_t num_token_ids, num_blocks, num_ranked;
    std::int32_t num_computed_tokens, slot, draw, top_k, logprobs, first_ranked, num_top;
    float temperature, top_p;
    std::uint8_t samples, has_mask, has_terms, unused;
};

template <typename T>
void append(std::vector<std::byte>& bytes, const T* values, std::size_t count) {
    const std::size_t before = bytes.size();
    bytes.resize(before + count * sizeof(T));
    if (count > 0) std::memcpy(bytes.data() + before, values, count * sizeof(T));
}

class Reader {
public:
    explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}

    template <typename T>
    void read(T* values, std::size_t count) {
        if (rest_.size() < count * sizeof(T)) throw std::logic_error("an order of rank 0 ends too early");
        if (count > 0) std::memcpy(values, rest_.data(), count * sizeof(T));
        rest_ = rest_.subspan(count * sizeof(T));
    }

private:
    std::span<const std::byte> rest_;
};

std::size_t mask_words(int vocab_size) { return static_cast<std::size_t>((vocab_size + 31) / 32); }

}  // namespace

std::vector<std::byte> write_order(OrderKind kind, std::span<const RunRow> rows, std::span<const StateCopy> copies, int vocab_size) {
    std::vector<std::byte> bytes;
    const std::uint32_t counts[] = {static_cast<std::uint32_t>(kind), static_cast<std::uint32_t>(rows.size()), static_cast<std::uint32_t>(copies.size())};
    append(bytes, counts, 3);
    append(bytes, copies.data(), copies.size());
    for (const RunRow& row : rows) {
        const Request& request = *row.request;
        RowLine line{};
        line.seed = request.seed;
        line.num_token_ids = static_cast<std::uint32_t>(row.token_ids.size());
        line.num_blocks = static_cast<std::uint32_t>(row.block_table.size());
        line.num_computed_tokens = row.num_computed_tokens;
        line.slot = row.slot;
        line.draw = row.draw;
        line.num_ranked = static_cast<std::uint32_t>(row.ranked.ids.size());
        line.first_ranked = row.ranked.first;
        line.num_top = row.ranked.num_top;
        line.top_k = request.top_k;
        line.logprobs = request.logprobs.value_or(-1);
        line.temperature = request.temperature;
        line.top_p = request.top_p;
        line.samples = row.samples;
        line.has_mask = row.mask != nullptr;
        line.has_terms = request.terms.has_value();
        append(bytes, &line, 1);
        append(bytes, row.token_ids.data(), row.token_ids.size());
        append(bytes, row.block_table.data(), row.block_table.size());
        append(bytes, row.ranked.ids.data(), row.ranked.ids.size());
        if (row.mask != nullptr) append(bytes, row.mask, mask_words(vocab_size));
    }
    return bytes;
}

StepOrder::StepOrder(std::span<const std::byte> bytes, int vocab_size) {
    Reader reader(bytes);
    std::uint32_t counts[3] = {};
    reader.read(counts, 3);
    kind_ = static_cast<OrderKind>(counts[0]);
    copies_.resize(counts[2]);
    reader.read(copies_.data(), copies_.size());
    for (std::uint32_t place = 0; place < counts[1]; ++place) {
        RowLine line{};
        reader.read(&line, 1);
        Owned& owned = *owned_.emplace_back(std::make_unique<Owned>());
        owned.token_ids.resize(line.num_token_ids);
        reader.read(owned.token_ids.data(), owned.token_ids.size());
        owned.block_table.resize(line.num_blocks);
        reader.read(owned.block_table.data(), owned.block_table.size());
        owned.ranked.resize(line.num_ranked);
        reader.read(owned.ranked.data(), owned.ranked.size());
        if (line.has_mask) {
            owned.mask.resize(mask_words(vocab_size));
            reader.read(owned.mask.data(), owned.mask.size());
        }
        owned.request.seed = line.seed;
        owned.request.top_k = line.top_k;
        owned.request.temperature = line.temperature;
        owned.request.top_p = line.top_p;
        if (line.logprobs >= 0) owned.request.logprobs = line.logprobs;
        if (line.has_terms) owned.request.terms.emplace();  // rank 0 has them, and what they change; here they mean that the row is drawn there whole
        RunRow& row = rows_.emplace_back();
        row.token_ids = owned.token_ids;
        row.num_computed_tokens = line.num_computed_tokens;
        row.block_table = owned.block_table;
        row.slot = line.slot;
        row.samples = line.samples != 0;
        row.request = &owned.request;
        row.draw = line.draw;
        row.mask = line.has_mask ? owned.mask.data() : nullptr;
        row.ranked = {line.first_ranked, owned.ranked, line.num_top, &owned.found};
    }
}

}  // namespace pocket
