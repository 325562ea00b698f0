// Decode steps as a device records them, replayed over a row's tokens: their logits are the CPU's, up to what bfloat16 rounds.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "models/qwen3_5.h"
#include "pocket/device.h"
#include "tiny_checkpoint.h"

using namespace pocket;

namespace {

constexpr int block_size = 16, num_blocks = 3;              // of each row

// A model on a device, and rows that decode from their first token on.
class Decoder {
public:
    Decoder(const std::string& name, Checkpoint& checkpoint, int num_rows, bool records) : num_rows_(num_rows), device_(make_device(name, 2)), model_(checkpoint, *device_, DType::bfloat16) {
        model_.reserve(num_rows, num_rows, num_rows);
        for (int layer = 0; layer < model_.num_attention_layers(); ++layer) {
            const std::size_t bytes = static_cast<std::size_t>(num_rows * num_blocks * block_size * model_.kv_size()) * item_size(DType::bfloat16);
            kv_.push_back({allocate(bytes), allocate(bytes), DType::bfloat16, num_rows * num_blocks, block_size});
        }
        const std::int64_t state_size = model_.delta_net_shape().state_size();
        for (int layer = 0; layer < model_.num_delta_net_layers(); ++layer)
            states_.push_back({static_cast<float*>(allocate(static_cast<std::size_t>(num_rows * state_size) * sizeof(float))), state_size, num_rows});
        step_.num_tokens = step_.num_rows = step_.num_decode = step_.num_samples = num_rows;
        step_.max_blocks = num_blocks, step_.max_query = 1, step_.max_length = num_blocks * block_size;
        inputs_ = static_cast<std::int32_t*>(allocate(sizeof(std::int32_t) * static_cast<std::size_t>(num_rows * (8 + num_blocks))));
        const auto array = [&](int number) { return inputs_ + number * num_rows; };
        step_.token_ids = array(0), step_.positions = array(1), step_.slot_mapping = array(2), step_.lengths = array(3), step_.state_slots = array(4), step_.sample_tokens = array(5);
        step_.row_starts = array(6), step_.block_tables = array(8);
        if (!records) return;
        upload(std::vector<std::int32_t>(static_cast<std::size_t>(num_rows), 0), 0, 0);
        model_.forward(step_, {kv_, states_});              // once before it is recorded
        graph_ = device_->capture([&] { recorded_ = model_.forward(step_, {kv_, states_}); });
    }

    bool has_graph() const { return graph_ != nullptr; }

    // Logits [num_rows, vocab_size] of the tokens at `position`; the first `num_empty` rows stand for none.
    std::vector<float> next(const std::vector<std::int32_t>& token_ids, int position, int num_empty) {
        upload(token_ids, position, num_empty);
        if (graph_) graph_->replay();
        const Tensor logits = graph_ ? recorded_ : model_.forward(step_, {kv_, states_});
        std::vector<float> values(static_cast<std::size_t>(num_rows_ * model_.vocab_size()));
        device_->download(values.data(), logits.data, values.size() * sizeof(float));
        return values;
    }

private:
    void* allocate(std::size_t num_bytes) {
        buffers_.push_back(device_->allocate(num_bytes));
        return buffers_.back()->data();
    }

    void upload(const std::vector<std::int32_t>& token_ids, int position, int num_empty) {
        const auto rows = static_cast<std::size_t>(num_rows_);
        std::vector<std::int32_t> all(rows * (8 + num_blocks));
        for (std::size_t row = 0; row < rows; ++row) {
            const bool is_there = static_cast<int>(row) >= num_empty;
            const auto block = [&](int number) { return static_cast<std::int32_t>(number * num_rows_ + (static_cast<int>(row) + number) % num_rows_); };
            all[row] = token_ids[row], all[rows + row] = is_there ? position : 0;
            all[2 * rows + row] = is_there ? block(position / block_size) * block_size + position % block_size : -1;
            all[3 * rows + row] = is_there ? position + 1 : 0, all[4 * rows + row] = is_there ? static_cast<std::int32_t>(rows - 1 - row) : -1;
            all[5 * rows + row] = all[6 * rows + row] = static_cast<std::int32_t>(row);
            for (int number = 0; number < num_blocks; ++number) all[8 * rows + row * num_blocks + static_cast<std::size_t>(number)] = block(number);
        }
        all[7 * rows] = num_rows_;
        device_->upload(inputs_, all.data(), all.size() * sizeof(std::int32_t));
    }

    int num_rows_;
    std::unique_ptr<Device> device_;
    Qwen3_5 model_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<KvCache> kv_;
    std::vector<StateCache> states_;
    Step step_;
    std::int32_t* inputs_ = nullptr;
    std::unique_ptr<Graph> graph_;
    Tensor recorded_;
};

// `num_steps` tokens of every row, with weights in bfloat16 and in float8. Errors are measured in the spread of the logits.
void check_steps(TinyCheckpoint tiny, int num_rows, int num_steps, int num_empty = 0) {
    tiny.type = "BF16";
    for (const std::string& name : linked_devices()) {
        for (const bool is_fp8 : {false, true}) {
            if (name == "cpu") continue;                    // the oracle, which records nothing
            TemporaryFolder folder;
            tiny.is_fp8 = is_fp8;
            tiny.make();
            tiny.write(folder.path());
            Checkpoint checkpoint(folder.path()), again(folder.path());
            Decoder device(name, checkpoint, num_rows, true), oracle("cpu", again, num_rows, false);
            CHECK(device.has_graph());
            Noise noise(5);
            for (int position = 0; position < num_steps; ++position) {
                std::vector<std::int32_t> token_ids;
                for (int row = 0; row < num_rows; ++row) token_ids.push_back(static_cast<std::int32_t>(noise.uniform() * tiny.vocab_size));
                const std::vector<float> wanted = oracle.next(token_ids, position, 0), found = device.next(token_ids, position, num_empty);
                for (int row = num_empty; row < num_rows; ++row) {
                    double error = 0, spread = 0;
                    for (std::size_t id = 0; id < static_cast<std::size_t>(tiny.vocab_size); ++id) {
                        const std::size_t at = static_cast<std::size_t>(row * tiny.vocab_size) + id;
                        error += std::pow(static_cast<double>(found[at]) - wanted[at], 2), spread += std::pow(static_cast<double>(wanted[at]), 2);
                    }
                    CHECK(std::sqrt(error / spread) < 0.05);
                }
            }
        }
    }
}

// Rows of what is cut into blocks of scales are multiples of 128, as in public checkpoints.
TinyCheckpoint tiny_of(int hidden_size, int intermediate_size, int num_heads, int num_kv_heads, int head_dim) {
    TinyCheckpoint tiny;
    tiny.hidden_size = hidden_size, tiny.intermediate_size = intermediate_size, tiny.num_heads = num_heads, tiny.num_kv_heads = num_kv_heads, tiny.head_dim = head_dim;
    tiny.num_layers = 4, tiny.num_key_heads = 2, tiny.num_value_heads = 4, tiny.key_dim = 32, tiny.value_dim = 32;
    return tiny;
}

}  // namespace

TEST(one_row) {
    TinyCheckpoint tiny = tiny_of(192, 640, 4, 1, 64);
    tiny.key_dim = tiny.value_dim = 128;                    // several parts of a head
    check_steps(tiny, 1, 20);
}

TEST(one_row_of_more_columns_than_a_copy_takes) { check_steps(tiny_of(1216, 2176, 6, 1, 32), 1, 3); }

TEST(a_few_rows) {
    check_steps(tiny_of(192, 640, 4, 2, 64), 3, 18, 1);     // the device's first one stands for none
    check_steps(tiny_of(64, 256, 6, 1, 32), 8, 3);
    TinyCheckpoint tiny = tiny_of(192, 1280, 4, 1, 64);
    tiny.value_dim = 64;
    check_steps(tiny, 5, 3);
    check_steps(tiny, 2, 2);
}

TEST(rows_that_come_in_parts_of_their_columns) { check_steps(tiny_of(64, 6144, 4, 2, 32), 8, 2); }
