// Draws and log probabilities on every device.
#include <limits>

#include "core/splitmix.h"
#include "ops_devices.h"
#include "tests/check.h"

using namespace pocket;
using namespace pocket::ops;

namespace {

constexpr int kVocab = 5000;

// Number i of a stream as a logit in [-scale / 2, scale / 2).
std::vector<float> make_logits(double scale, int vocab = kVocab) {
    std::vector<float> logits(static_cast<std::size_t>(vocab));
    for (int i = 0; i < vocab; ++i)
        logits[static_cast<std::size_t>(i)] =
            static_cast<float>((static_cast<double>(splitmix64(7, static_cast<std::uint64_t>(i)) >> 11) * 0x1p-53 - 0.5) * scale);
    return logits;
}

std::vector<std::uint32_t> make_mask() {
    std::vector<std::uint32_t> words((kVocab + 31) / 32);
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<std::uint32_t>(splitmix64(99, i));
    return words;
}

struct How {
    float temperature = 1, top_p = 1;
    std::int32_t top_k = 0;
    std::uint64_t seed = 0;
    std::int32_t draw = 0, num_logprobs = -1;
    const std::uint32_t* mask = nullptr;
};

// One sample a row of logits [rows, vocab].
std::vector<SampleOutput> sample(Device& device, const std::vector<float>& logits, const std::vector<How>& rows) {
    const std::int64_t count = static_cast<std::int64_t>(rows.size());
    const Array array(device, logits);
    std::vector<float> temperatures, top_ps;
    std::vector<std::int32_t> top_ks, draws, num_logprobs;
    std::vector<std::uint64_t> seeds;
    std::vector<const std::uint32_t*> masks;
    for (const How& how : rows) {
        temperatures.push_back(how.temperature);
        top_ps.push_back(how.top_p);
        top_ks.push_back(how.top_k);
        draws.push_back(how.draw);
        num_logprobs.push_back(how.num_logprobs);
        seeds.push_back(how.seed);
        masks.push_back(how.mask);
    }
    std::vector<SampleOutput> outputs(rows.size());
    device.reserve(static_cast<int>(count), static_cast<int>(count));
    device.sample(matrix(array, count, static_cast<std::int64_t>(logits.size()) / count), {temperatures, top_ps, top_ks, seeds, draws, num_logprobs, masks},
                  outputs);
    return outputs;
}

// What the torch plane draws: pocketllm/torch_engine/sampler.py with the logits and the mask above, draw d = 0 to 3 with seed 12345 + 977 d.
struct Drawn {
    float scale, temperature, top_p;
    int top_k;
    bool is_masked;
    int ids[4];
};
constexpr Drawn kTorchPlane[] = {
    {0.5f, 0.0f, 1.0f, 0, false, {98, 98, 98, 98}},
    {0.5f, 0.0f, 1.0f, 0, true, {98, 98, 98, 98}},
    {0.5f, 1.0f, 1.0f, 0, false, {1402, 2898, 4616, 2429}},
    {0.5f, 1.0f, 1.0f, 0, true, {2188, 3013, 4616, 2852}},
    {0.5f, 0.5f, 1.0f, 0, false, {1402, 2898, 4616, 4105}},
    {0.5f, 0.5f, 1.0f, 0, true, {2188, 3013, 4616, 2852}},
    {0.5f, 2.0f, 1.0f, 0, false, {1402, 2898, 4616, 2429}},
    {0.5f, 2.0f, 1.0f, 0, true, {2188, 1628, 4616, 2852}},
    {0.5f, 1.0f, 0.9f, 0, false, {1402, 2898, 3058, 2429}},
    {0.5f, 1.0f, 0.9f, 0, true, {2188, 3013, 3058, 2852}},
    {0.5f, 1.0f, 0.25f, 0, false, {1263, 2953, 4864, 4105}},
    {0.5f, 1.0f, 0.25f, 0, true, {2229, 2953, 3757, 2852}},
    {0.5f, 0.75f, 0.5f, 40, false, {3527, 3527, 4376, 4798}},
    {0.5f, 0.75f, 0.5f, 40, true, {3527, 1318, 1779, 3128}},
    {0.5f, 1.0f, 1.0f, 5, false, {3527, 3527, 148, 1006}},
    {0.5f, 1.0f, 1.0f, 5, true, {3527, 3527, 98, 3716}},
    {0.5f, 1.5f, 1.0f, 1, false, {98, 98, 98, 98}},
    {0.5f, 1.5f, 1.0f, 1, true, {98, 98, 98, 98}},
    {0.5f, 1.0f, 0.875f, 700, false, {1241, 4434, 4864, 4105}},
    {0.5f, 1.0f, 0.875f, 700, true, {2229, 2953, 3757, 2852}},
    {8.0f, 0.0f, 1.0f, 0, false, {98, 98, 98, 98}},
    {8.0f, 0.0f, 1.0f, 0, true, {98, 98, 98, 98}},
    {8.0f, 1.0f, 1.0f, 0, false, {1402, 2898, 4864, 4105}},
    {8.0f, 1.0f, 1.0f, 0, true, {2842, 1669, 1818, 2726}},
    {8.0f, 0.5f, 1.0f, 0, false, {1241, 1669, 4864, 2978}},
    {8.0f, 0.5f, 1.0f, 0, true, {3527, 4434, 1818, 2726}},
    {8.0f, 2.0f, 1.0f, 0, false, {1402, 2898, 4864, 4105}},
    {8.0f, 2.0f, 1.0f, 0, true, {2842, 3013, 3058, 2852}},
    {8.0f, 1.0f, 0.9f, 0, false, {1241, 4434, 4864, 4105}},
    {8.0f, 1.0f, 0.9f, 0, true, {3527, 4434, 349, 2852}},
    {8.0f, 1.0f, 0.25f, 0, false, {3527, 4434, 2202, 2978}},
    {8.0f, 1.0f, 0.25f, 0, true, {3527, 4434, 349, 130}},
    {8.0f, 0.75f, 0.5f, 40, false, {3527, 3527, 4376, 4798}},
    {8.0f, 0.75f, 0.5f, 40, true, {3527, 1318, 1779, 3128}},
    {8.0f, 1.0f, 1.0f, 5, false, {3527, 3527, 148, 1006}},
    {8.0f, 1.0f, 1.0f, 5, true, {3527, 3527, 98, 3716}},
    {8.0f, 1.5f, 1.0f, 1, false, {98, 98, 98, 98}},
    {8.0f, 1.5f, 1.0f, 1, true, {98, 98, 98, 98}},
    {8.0f, 1.0f, 0.875f, 700, false, {1241, 4434, 4864, 4105}},
    {8.0f, 1.0f, 0.875f, 700, true, {3527, 4434, 349, 2852}},
    {40.0f, 0.0f, 1.0f, 0, false, {98, 98, 98, 98}},
    {40.0f, 0.0f, 1.0f, 0, true, {98, 98, 98, 98}},
    {40.0f, 1.0f, 1.0f, 0, false, {3527, 4434, 349, 2978}},
    {40.0f, 1.0f, 1.0f, 0, true, {3527, 4434, 349, 130}},
    {40.0f, 0.5f, 1.0f, 0, false, {3527, 1318, 349, 4798}},
    {40.0f, 0.5f, 1.0f, 0, true, {3527, 1318, 349, 130}},
    {40.0f, 2.0f, 1.0f, 0, false, {3527, 1669, 4864, 2978}},
    {40.0f, 2.0f, 1.0f, 0, true, {3527, 4434, 349, 2726}},
    {40.0f, 1.0f, 0.9f, 0, false, {3527, 4434, 349, 2978}},
    {40.0f, 1.0f, 0.9f, 0, true, {3527, 4434, 349, 130}},
    {40.0f, 1.0f, 0.25f, 0, false, {3527, 2370, 4968, 4798}},
    {40.0f, 1.0f, 0.25f, 0, true, {3527, 1318, 1779, 2370}},
    {40.0f, 0.75f, 0.5f, 40, false, {3527, 3527, 4376, 4798}},
    {40.0f, 0.75f, 0.5f, 40, true, {3527, 1318, 1779, 3716}},
    {40.0f, 1.0f, 1.0f, 5, false, {3527, 3527, 148, 1006}},
    {40.0f, 1.0f, 1.0f, 5, true, {3527, 3527, 98, 3716}},
    {40.0f, 1.5f, 1.0f, 1, false, {98, 98, 98, 98}},
    {40.0f, 1.5f, 1.0f, 1, true, {98, 98, 98, 98}},
    {40.0f, 1.0f, 0.875f, 700, false, {3527, 4434, 349, 2978}},
    {40.0f, 1.0f, 0.875f, 700, true, {3527, 4434, 349, 130}},
};

}  // namespace

TEST(seeded_draws_are_those_of_the_torch_plane) {
    const std::vector<std::uint32_t> mask = make_mask();
    on_every_device([&](Device& device, const std::string& where) {
        for (const Drawn& drawn : kTorchPlane) {
            std::vector<float> logits;
            std::vector<How> rows;
            for (int draw = 0; draw < 4; ++draw) {
                const std::vector<float> row = make_logits(drawn.scale);
                logits.insert(logits.end(), row.begin(), row.end());
                rows.push_back({drawn.temperature, drawn.top_p, drawn.top_k, static_cast<std::uint64_t>(12345 + draw * 977), draw, -1,
                                drawn.is_masked ? mask.data() : nullptr});
            }
            const std::vector<SampleOutput> outputs = sample(device, logits, rows);
            for (std::size_t draw = 0; draw < 4; ++draw) {
                if (outputs[draw].token_id == drawn.ids[draw]) continue;
                check::fail(__FILE__, __LINE__,
                            where + ": draw " + std::to_string(draw) + " of scale " + std::to_string(drawn.scale) + ", temperature " +
                                std::to_string(drawn.temperature) + ", top_p " + std::to_string(drawn.top_p) + ", top_k " + std::to_string(drawn.top_k) +
                                (drawn.is_masked ? ", masked" : "") + ": " + std::to_string(outputs[draw].token_id) + " is not " +
                                std::to_string(drawn.ids[draw]));
            }
        }
    });
}

TEST(log_probabilities_are_over_the_whole_vocabulary) {
    const std::vector<std::uint32_t> mask = make_mask();
    on_every_device([&](Device& device, const std::string&) {
        for (const double scale : {0.5, 8.0, 200.0}) {
            const std::vector<float> logits = make_logits(scale);
            double total = 0;
            for (const float logit : logits) total += std::exp(static_cast<double>(logit));
            std::vector<std::int32_t> order(kVocab);
            for (int i = 0; i < kVocab; ++i) order[static_cast<std::size_t>(i)] = i;
            std::stable_sort(order.begin(), order.end(),
                             [&](int a, int b) { return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)]; });
            for (const std::int32_t wanted : {-1, 0, 1, 5, 20}) {
                const SampleOutput output = sample(device, logits, {{0.7f, 0.9f, 50, 3, 1, wanted, mask.data()}})[0];
                CHECK_EQ(output.num_top, std::max(0, wanted));
                CHECK_NEAR(output.logprob, logits[static_cast<std::size_t>(output.token_id)] - std::log(total), 2e-5);
                for (int i = 0; i < output.num_top; ++i) {
                    CHECK_EQ(output.top_ids[i], order[static_cast<std::size_t>(i)]);
                    CHECK_NEAR(output.top_logprobs[i], logits[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] - std::log(total), 2e-5);
                }
            }
        }
    });
}

TEST(of_equal_logits_the_lower_id_comes_first) {
    on_every_device([](Device& device, const std::string&) {
        for (const int vocab : {40, 5000}) {
            std::vector<float> logits(static_cast<std::size_t>(vocab), 0.0f);
            for (const int id : {5, 21, 33, vocab - 1}) logits[static_cast<std::size_t>(id)] = 2.0f;
            const SampleOutput output = sample(device, logits, {{0, 1, 0, 1, 0, 6}})[0];
            CHECK_EQ(output.token_id, 5);
            CHECK_EQ(std::vector<std::int32_t>(output.top_ids, output.top_ids + 6), (std::vector<std::int32_t>{5, 21, 33, vocab - 1, 0, 1}));
            std::vector<std::uint32_t> mask(static_cast<std::size_t>(vocab + 31) / 32, 0xffffffffu);
            mask[0] = ~(1u << 5);
            CHECK_EQ(sample(device, logits, {{0, 1, 0, 1, 0, -1, mask.data()}})[0].token_id, 21);
            CHECK_EQ(sample(device, logits, {{1.0f, 1, 1, 1, 0, -1, mask.data()}})[0].token_id, 21);
        }
    });
}

TEST(a_mask_of_one_id_draws_it) {
    on_every_device([](Device& device, const std::string&) {
        const std::vector<float> logits = make_logits(30.0);
        std::vector<std::uint32_t> mask((kVocab + 31) / 32, 0);
        mask[4321 / 32] = 1u << (4321 % 32);
        for (const How& how : {How{0, 1, 0}, How{1, 1, 0}, How{1, 0.5f, 0}, How{2, 1, 7}, How{0.01f, 0.9f, 300}}) {
            How masked = how;
            masked.mask = mask.data();
            CHECK_EQ(sample(device, logits, {masked})[0].token_id, 4321);
        }
        const std::vector<std::uint32_t> none((kVocab + 31) / 32, 0);
        const SampleOutput output = sample(device, logits, {{1, 1, 0, 0, 0, 5, none.data()}})[0];
        CHECK(!output.is_finite);
        CHECK_EQ(output.token_id, -1);
    });
}

TEST(logits_that_are_not_finite_fail_their_row_alone) {
    on_every_device([](Device& device, const std::string&) {
        std::vector<float> logits;
        for (int row = 0; row < 4; ++row) {
            const std::vector<float> one = make_logits(4.0);
            logits.insert(logits.end(), one.begin(), one.end());
        }
        logits[kVocab + 4999] = std::numeric_limits<float>::quiet_NaN();
        logits[2 * kVocab + 17] = std::numeric_limits<float>::infinity();
        const How greedy{0, 1, 0, 0, 0, 3}, warm{1, 1, 0, 5, 2, 3};
        const std::vector<SampleOutput> outputs = sample(device, logits, {greedy, greedy, warm, warm}), alone = sample(device, make_logits(4.0), {warm});
        CHECK(outputs[0].is_finite);
        CHECK(!outputs[1].is_finite);
        CHECK(!outputs[2].is_finite);
        CHECK(outputs[3].is_finite);
        CHECK_EQ(outputs[1].token_id, -1);
        CHECK_EQ(outputs[3].token_id, alone[0].token_id);
        CHECK_EQ(outputs[3].logprob, alone[0].logprob);
    });
}

TEST(draws_of_a_large_vocabulary_are_those_of_one_thread_of_the_cpu) {
    constexpr int kLarge = 140001;
    std::vector<std::uint32_t> mask((kLarge + 31) / 32);
    for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = static_cast<std::uint32_t>(splitmix64(98, i));
    std::vector<float> logits;
    std::vector<How> rows;
    for (const double scale : {0.5, 12.0, 60.0}) {
        const std::vector<float> row = make_logits(scale, kLarge);
        for (const How& how : {How{1, 1, 0, 21, 0, 20}, How{1, 0.9f, 0, 22, 1}, How{0.7f, 0.9f, 50, 23, 2, 5}, How{1.5f, 0.3f, 0, 24, 3, -1, mask.data()}, How{1, 0.95f, 900, 25, 4},
                               How{1, 1, 0, 26, 5, 1, mask.data()}}) {
            logits.insert(logits.end(), row.begin(), row.end());
            rows.push_back(how);
        }
    }
    CpuDevice oracle(1);
    const std::vector<SampleOutput> wanted = sample(oracle, logits, rows);
    on_every_device([&](Device& device, const std::string&) {
        const std::vector<SampleOutput> found = sample(device, logits, rows);
        for (std::size_t row = 0; row < rows.size(); ++row) {
            CHECK_EQ(found[row].token_id, wanted[row].token_id);
            CHECK_NEAR(found[row].logprob, wanted[row].logprob, 2e-5);
            CHECK_EQ(std::vector<std::int32_t>(found[row].top_ids, found[row].top_ids + found[row].num_top),
                     std::vector<std::int32_t>(wanted[row].top_ids, wanted[row].top_ids + wanted[row].num_top));
        }
    });
}

TEST(draws_follow_the_distribution) {
    on_every_device([](Device& device, const std::string&) {
        const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
        constexpr int kDraws = 4000;
        std::vector<float> all;
        std::vector<How> rows;
        for (int draw = 0; draw < kDraws; ++draw) {
            all.insert(all.end(), logits.begin(), logits.end());
            rows.push_back({1, 0.9f, 0, 11, draw});
        }
        std::vector<int> counts(4);
        for (const SampleOutput& output : sample(device, all, rows)) ++counts[static_cast<std::size_t>(output.token_id)];
        CHECK_NEAR(counts[0], kDraws * 0.5 / 0.95, 130);
        CHECK_NEAR(counts[1], kDraws * 0.3 / 0.95, 130);
        CHECK_NEAR(counts[2], kDraws * 0.15 / 0.95, 130);
        CHECK_EQ(counts[3], 0);
    });
}
