// A small trained model on every linked device: its answers in float32 are the CPU's, those in bfloat16 part from them only where two ids are about as likely.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "engine/qwen_engine.h"
#include "pocket/device.h"

using namespace pocket;

namespace {

constexpr double margin = 0.1;  // nat

QwenEngine load(const std::string& device, const std::string& dtype) {
    QwenEngineOptions options;
    options.device = device;
    options.dtype = dtype;
    options.max_model_len = 256;
    options.max_batch_size = 1;
    options.num_threads = 2;
    options.prefill_chunk_tokens = 16;
    return QwenEngine(POCKET_REPOSITORY "/tests/models/tiny_qwen3_5_trained", options);
}

std::vector<std::int32_t> prompt_of(int length, int vocab_size) {
    std::vector<std::int32_t> ids;
    for (int place = 0; place < length; ++place) ids.push_back((place * 37 + length * 11 + 5) % vocab_size);
    return ids;
}

// How much less likely than the best `id` is after `ids`.
double behind_best(QwenEngine& oracle, const std::vector<std::int32_t>& ids, std::int32_t id) {
    oracle.reset();
    const std::vector<float> logits = oracle.logits(ids);
    const float* last = logits.data() + logits.size() - static_cast<std::size_t>(oracle.config().vocab_size);
    return static_cast<double>(*std::max_element(last, last + oracle.config().vocab_size)) - last[id];
}

}  // namespace

TEST(greedy_answers_are_those_of_the_cpu) {
    QwenEngine oracle = load("cpu", "float32");
    for (const std::string& device : linked_devices()) {
        for (const std::string dtype : {"float32", "bfloat16"}) {
            QwenEngine engine = load(device, dtype);
            for (const int length : {1, 5, 16, 17, 90}) {
                const std::vector<std::int32_t> prompt = prompt_of(length, engine.config().vocab_size);
                oracle.reset(), engine.reset();
                const std::vector<std::int32_t> wanted = oracle.generate(prompt, 40), found = engine.generate(prompt, 40);
                CHECK_EQ(found.size(), wanted.size());
                const auto [at, other] = std::mismatch(wanted.begin(), wanted.end(), found.begin());
                if (at == wanted.end()) continue;
                CHECK(dtype != "float32");
                std::vector<std::int32_t> before = prompt;
                before.insert(before.end(), wanted.begin(), at);
                CHECK(behind_best(oracle, before, *other) < margin);
            }
        }
    }
}
