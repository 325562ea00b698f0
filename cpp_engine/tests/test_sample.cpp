// Draws and log probabilities on every device.
#include <limits>

#include "core/splitmix.h"
#include "engine/sample_rows.h"
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
    std::vector<LogitEdit> edits = {};
    float min_p = 0;
};

// One sample a row of logits [rows, vocab].
std::vector<SampleOutput> sample(Device& device, const std::vector<float>& logits, const std::vector<How>& rows) {
    const std::int64_t count = static_cast<std::int64_t>(rows.size());
    const Array array(device, logits);
    SampleRows asked;
    bool has_terms = false;
    for (const How& how : rows) {
        asked.edits.emplace_back(how.edits);
        asked.min_ps.push_back(how.min_p);
        has_terms = has_terms || !how.edits.empty() || how.min_p > 0;
        asked.temperatures.push_back(how.temperature);
        asked.top_ps.push_back(how.top_p);
        asked.top_ks.push_back(how.top_k);
        asked.draws.push_back(how.draw);
        asked.num_logprobs.push_back(how.num_logprobs);
        asked.seeds.push_back(how.seed);
        asked.masks.push_back(how.mask);
    }
    std::vector<SampleOutput> outputs(rows.size());
    device.reserve(static_cast<int>(count), static_cast<int>(count));
    if (!has_terms) asked.edits.clear(), asked.min_ps.clear();
    device.sample(matrix(array, count, static_cast<std::int64_t>(logits.size()) / count), asked.view(), outputs);
    const std::vector<float> left = array.values();
    CHECK(std::memcmp(left.data(), logits.data(), logits.size() * sizeof(float)) == 0);  // they are left as they are
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

// One row in float64 as device.h defines it, with noise of its own for each id: edits, mask, min_p, top_k, top_p.
std::int32_t reference(const std::vector<float>& logits, const How& how) {
    std::vector<double> changed(logits.begin(), logits.end());
    for (const LogitEdit& edit : how.edits) {
        double& logit = changed[static_cast<std::size_t>(edit.id)];
        logit = (logit > 0 ? logit / edit.scale : logit * edit.scale) + edit.offset;
    }
    std::vector<std::int32_t> order;
    for (std::size_t id = 0; id < changed.size(); ++id) {
        if (std::isfinite(changed[id]) && (!how.mask || (how.mask[id / 32] >> (id % 32) & 1u))) order.push_back(static_cast<std::int32_t>(id));
    }
    const auto logit_of = [&](std::int32_t id) { return changed[static_cast<std::size_t>(id)]; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logit_of(a) > logit_of(b); });
    if (how.temperature == 0 || how.top_k == 1) return order[0];
    const auto scaled = [&](std::int32_t id) { return (logit_of(id) - logit_of(order[0])) / how.temperature; };
    std::size_t kept = order.size();
    if (how.min_p > 0) while (kept > 1 && scaled(order[kept - 1]) < std::log(static_cast<double>(how.min_p))) --kept;
    if (how.top_k > 0) kept = std::min(kept, static_cast<std::size_t>(how.top_k));
    if (how.top_p < 1) {
        double total = 0, mass = 0;
        for (std::size_t i = 0; i < kept; ++i) total += std::exp(scaled(order[i]));
        std::size_t count = 0;
        while (count < kept && mass < how.top_p * total) mass += std::exp(scaled(order[count++]));
        kept = count;
    }
    const std::uint64_t stream = splitmix64(splitmix64(how.seed, 0), static_cast<std::uint64_t>(how.draw));
    std::int32_t best = -1;
    double most = -std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < kept; ++i) {
        const double uniform = (static_cast<double>(splitmix64(stream, static_cast<std::uint64_t>(order[i]) + 1) >> 11) + 0.5) * 0x1p-53;
        const double sum = scaled(order[i]) - std::log(-std::log(uniform));
        if (sum > most) most = sum, best = order[i];
    }
    return best;
}

// Edits of every third id, some of which are ruled out and some of which are made likely.
std::vector<LogitEdit> make_edits(int vocab, std::uint64_t seed) {
    Random random(seed);
    std::vector<LogitEdit> edits;
    for (int id = random.below(3); id < vocab; id += 3) {
        const float offset = random.below(8) == 0 ? -std::numeric_limits<float>::infinity() : static_cast<float>(random.next() * 4);
        edits.push_back({id, random.below(2) == 0 ? 1.0f : static_cast<float>(1.4 + random.next()), offset});
    }
    return edits;
}

TEST(edits_and_min_p_draw_what_the_reference_draws) {
    constexpr int kSmall = 200;  // as many as the CPU device gives noise of their own
    std::vector<std::uint32_t> mask((kSmall + 31) / 32);
    for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = static_cast<std::uint32_t>(splitmix64(97, i));
    std::vector<float> logits;
    std::vector<How> rows;
    std::vector<std::int32_t> wanted;
    for (int i = 0; i < 240; ++i) {
        const std::vector<float> row = make_logits(i % 2 == 0 ? 4.0 : 14.0, kSmall);
        How how{i % 5 == 0 ? 0.0f : 0.9f, i % 3 == 0 ? 0.8f : 1.0f, i % 4 == 0 ? 20 : 0, static_cast<std::uint64_t>(i), i};
        if (i % 7 < 3) how.mask = mask.data();
        if (i % 3 < 2) how.edits = make_edits(kSmall, static_cast<std::uint64_t>(i));
        if (i % 4 < 2) how.min_p = i % 8 < 4 ? 0.05f : 0.4f;
        if (i % 60 == 1) how.min_p = 1.0f;
        logits.insert(logits.end(), row.begin(), row.end());
        wanted.push_back(reference(row, how));
        rows.push_back(std::move(how));
    }
    on_every_device([&](Device& device, const std::string& where) {
        const std::vector<SampleOutput> found = sample(device, logits, rows);
        for (std::size_t row = 0; row < rows.size(); ++row) {
            if (found[row].token_id != wanted[row])
                check::fail(__FILE__, __LINE__, where + ": row " + std::to_string(row) + " drew " + std::to_string(found[row].token_id) + " and not " + std::to_string(wanted[row]));
        }
        for (std::size_t row = 0; row < rows.size(); row += 17) {  // alone as in the batch
            const std::vector<float> own(logits.begin() + static_cast<std::ptrdiff_t>(row) * kSmall, logits.begin() + static_cast<std::ptrdiff_t>(row + 1) * kSmall);
            CHECK_EQ(sample(device, own, {rows[row]})[0].token_id, wanted[row]);
        }
    });
}

TEST(edits_of_a_large_vocabulary_draw_what_one_thread_of_the_cpu_draws) {
    constexpr int kLarge = 140001;
    std::vector<std::uint32_t> mask((kLarge + 31) / 32);
    for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = static_cast<std::uint32_t>(splitmix64(98, i));
    std::vector<float> logits;
    std::vector<How> rows;
    for (const double scale : {0.5, 12.0, 60.0}) {
        const std::vector<float> row = make_logits(scale, kLarge);
        const std::vector<LogitEdit> edits = make_edits(kLarge, static_cast<std::uint64_t>(scale));
        for (const How& how : {How{1, 1, 0, 21, 0, 20, nullptr, edits}, How{1, 0.9f, 0, 22, 1, -1, nullptr, {}, 0.02f}, How{0.7f, 0.9f, 50, 23, 2, 5, nullptr, edits, 0.1f},
                               How{1.5f, 0.3f, 0, 24, 3, -1, mask.data(), edits}, How{1, 0.95f, 900, 25, 4, 0, mask.data(), edits, 0.001f}, How{1, 1, 0, 26, 5, 1, mask.data()},
                               How{0, 1, 0, 27, 6, 3, mask.data(), edits, 0.5f}, How{1, 1, 0, 28, 7, 2, nullptr, edits, 0.9f}}) {
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
            if (rows[row].num_logprobs < 0) continue;
            CHECK_NEAR(found[row].logprob, wanted[row].logprob, 2e-5);
            CHECK_EQ(std::vector<std::int32_t>(found[row].top_ids, found[row].top_ids + found[row].num_top),
                     std::vector<std::int32_t>(wanted[row].top_ids, wanted[row].top_ids + wanted[row].num_top));
        }
    });
}

TEST(log_probabilities_are_of_the_logits_before_edits_and_min_p) {
    const std::vector<std::uint32_t> mask = make_mask();
    on_every_device([&](Device& device, const std::string&) {
        const std::vector<float> logits = make_logits(8.0);
        double total = 0;
        for (const float logit : logits) total += std::exp(static_cast<double>(logit));
        const SampleOutput plain = sample(device, logits, {{0, 1, 0, 0, 0, 20}})[0];
        for (const How& how : {How{0.7f, 0.9f, 50, 3, 1, 20, mask.data(), make_edits(kVocab, 5)}, How{1, 1, 0, 4, 2, 20, nullptr, make_edits(kVocab, 6), 0.3f},
                               How{1, 1, 0, 4, 2, 20, nullptr, {}, 0.6f}, How{0, 1, 0, 4, 2, 20, nullptr, make_edits(kVocab, 7)}}) {
            const SampleOutput output = sample(device, logits, {how})[0];
            CHECK_EQ(output.num_top, 20);
            CHECK_NEAR(output.logprob, logits[static_cast<std::size_t>(output.token_id)] - std::log(total), 2e-5);
            for (int i = 0; i < output.num_top; ++i) {
                CHECK_EQ(output.top_ids[i], plain.top_ids[i]);
                CHECK_NEAR(output.top_logprobs[i], plain.top_logprobs[i], 2e-5);
            }
        }
    });
}

TEST(edits_hide_no_logit_that_is_not_finite_and_may_leave_nothing) {
    on_every_device([](Device& device, const std::string&) {
        std::vector<float> logits = make_logits(8.0);
        std::vector<LogitEdit> all;
        for (int id = 0; id < kVocab; ++id) all.push_back({id, 1.0f, -std::numeric_limits<float>::infinity()});
        CHECK(!sample(device, logits, {{1, 1, 0, 1, 0, -1, nullptr, all}})[0].is_finite);
        logits[77] = std::numeric_limits<float>::quiet_NaN();
        for (const std::int32_t id : {77, 78}) CHECK(!sample(device, logits, {{1, 1, 0, 1, 0, -1, nullptr, {{id, 2.0f, -std::numeric_limits<float>::infinity()}}, 0.5f}})[0].is_finite);
    });
}
