// engine/cache_plan: how memory is divided, and the figures of the refusal where it is too small. The model here has figures only.
#include "engine/cache_plan.h"

#include <algorithm>
#include <string>

#include "check.h"
#include "pocket/error.h"

using namespace pocket;

namespace {

// 2 attention layers of 2 heads of 64 values, 6 DeltaNet layers: in float32 a block is 32 KiB, a slot 6 * 19 KiB.
class Figures : public Model {
public:
    int positions = 4096, delta_net_layers = 6;

    std::string architecture() const override { return "figures"; }
    int vocab_size() const noexcept override { return 100; }
    int max_positions() const noexcept override { return positions; }
    int num_attention_layers() const noexcept override { return 2; }
    int num_delta_net_layers() const noexcept override { return delta_net_layers; }
    std::int64_t kv_size() const noexcept override { return 128; }
    AttentionShape attention_shape() const noexcept override { return {4, 2, 64, 16}; }
    DeltaNetShape delta_net_shape() const noexcept override { return {2, 4, 32, 32, 4}; }
    std::size_t weight_bytes() const noexcept override { return 0; }
    std::size_t bytes_per_token() const noexcept override { return 0; }
    void reserve(int, int, int) override {}
    Tensor forward(const Step&, const ModelCaches&) override { throw Error(ErrorKind::unavailable, "figures only"); }
    Tensor logits(const Step&) override { throw Error(ErrorKind::unavailable, "figures only"); }
};

constexpr std::size_t mebibyte = 1 << 20, block = 2 * 2 * 128 * 4 * 16, slot = 6 * (4 * 32 * 32 + 3 * 256) * 4;

DeviceInfo device_with(std::size_t free_memory) {
    DeviceInfo device;
    device.name = "cpu";
    device.total_memory = 4096 * mebibyte;
    device.free_memory = free_memory;
    return device;
}

CachePlan plan(const CacheOptions& options, std::size_t free_memory = 4000 * mebibyte, const Figures& model = {}) {
    return plan_caches(model, device_with(free_memory), options);
}

std::string field_of(const CacheOptions& options) {
    try {
        plan(options);
    } catch (const Error& error) {
        return error.field();
    }
    return {};
}

}  // namespace

TEST(ample_memory_holds_all_rows) {
    const CachePlan found = plan({});
    CHECK_EQ(slot_bytes(Figures()), slot);
    CHECK_EQ(found.shape.block_size, 16);
    CHECK_EQ(found.shape.num_row_slots, 8);
    CHECK_EQ(found.shape.num_snapshot_slots, 32);
    CHECK_EQ(found.shape.num_blocks, 8 * 256);
    CHECK_EQ(found.shape.max_model_len, 4096);
    CHECK_EQ(found.shape.snapshot_interval, 512);
    CHECK_EQ(found.kv_bytes, 8 * 256 * block);
    CHECK_EQ(found.state_bytes, 40 * slot);
    CHECK(found.limits.empty());
}

TEST(an_explicit_memory_is_filled) {
    CacheOptions options;
    options.kv_cache_memory = 1000 * mebibyte;
    const CachePlan found = plan(options, 10 * mebibyte);
    CHECK(found.kv_bytes + found.state_bytes <= options.kv_cache_memory);
    CHECK(found.kv_bytes + found.state_bytes + block > options.kv_cache_memory);
}

TEST(a_context_that_nobody_asked_for_is_shortened) {
    const CachePlan found = plan({}, 40 * mebibyte);
    CHECK(found.shape.max_model_len < 4096);
    CHECK_EQ(found.shape.max_model_len, found.shape.num_blocks * 16);
    CHECK(found.kv_bytes + found.state_bytes <= 10 * mebibyte);
    CHECK_EQ(found.limits.size(), 1u);
    CHECK(found.limits[0].starts_with("max_model_len is " + std::to_string(found.shape.max_model_len) + ": the model was made for 4096, whose KV cache"));
}

TEST(rows_that_nobody_asked_for_are_fewer) {
    Figures model;
    model.delta_net_layers = 60;
    const CachePlan found = plan({}, 40 * mebibyte, model);  // of 10 MiB, 5 are for rows of 1.14 MiB
    CHECK_EQ(found.shape.num_row_slots, 4);
    CHECK_EQ(found.limits.size(), 2u);
    CacheOptions asked;
    asked.max_batch_size = 6;
    CHECK_EQ(plan(asked, 40 * mebibyte, model).shape.num_row_slots, 6);
}

TEST(a_context_that_was_asked_for_comes_before_rows_and_snapshots) {
    CacheOptions options;
    options.max_model_len = 2400;  // 150 blocks, 4.7 of 5 MiB
    const CachePlan found = plan(options, 20 * mebibyte);
    CHECK_EQ(found.shape.max_model_len, 2400);
    CHECK(found.shape.num_blocks >= 150);
    CHECK_EQ(found.shape.num_row_slots, 2);
    CHECK_EQ(found.shape.num_snapshot_slots, 0);
}

TEST(snapshots) {
    CacheOptions options;
    options.enable_prefix_caching = false;
    CHECK_EQ(plan(options).shape.num_snapshot_slots, 0);
    options = {};
    options.prefill_token_budget = 1000;
    CHECK_EQ(plan(options).shape.snapshot_interval, 1008);
    options.prefill_token_budget = 64;
    CHECK_EQ(plan(options).shape.snapshot_interval, 512);
    options.prefill_token_budget = 0;
    CHECK_EQ(plan(options).shape.snapshot_interval, 8192);
}

TEST(a_model_without_states) {
    Figures model;
    model.delta_net_layers = 0;
    const CachePlan found = plan({}, 4000 * mebibyte, model);
    CHECK_EQ(found.state_bytes, 0u);
    CHECK_EQ(found.shape.num_snapshot_slots, 0);
    CHECK_EQ(found.shape.snapshot_interval, 0);
    CHECK_EQ(found.shape.num_row_slots, 8);
}

TEST(smaller_values_take_less) {
    CacheOptions options;
    options.kv_cache_dtype = DType::bfloat16;
    CHECK_EQ(plan(options).kv_bytes, 8 * 256 * block / 2);
}

// A GPU's memory is the engine's own, but for what it keeps to steps.
TEST(a_device_says_what_is_left_to_the_caches) {
    DeviceInfo gpu = device_with(9 * mebibyte);
    gpu.name = "cuda:0";
    gpu.cache_share = 0.95;
    gpu.kept_memory = 3 * mebibyte;
    CacheOptions options;
    options.default_rows = 64;
    const CachePlan kept = plan_caches(Figures(), gpu, options);  // 6 MiB, which is less than 95% of 9
    CHECK(kept.kv_bytes + kept.state_bytes <= 6 * mebibyte);
    CHECK(kept.kv_bytes + kept.state_bytes + block + slot > 6 * mebibyte);
    gpu.kept_memory = 1;
    const CachePlan shared = plan_caches(Figures(), gpu, options);
    CHECK(shared.kv_bytes + shared.state_bytes <= 9 * mebibyte * 95 / 100);
    CHECK(shared.kv_bytes > kept.kv_bytes);
    CHECK_EQ(shared.limits.size(), 2u);
    CHECK(shared.limits.at(0).ends_with("whose KV cache does not fit into 95% of the free memory"));
    options.kv_cache_memory = 10 * mebibyte;
    CHECK_THROWS(plan_caches(Figures(), gpu, options),
                 "\"kv_cache_memory\" = 10485760 is more than the 9 MiB that are free on cuda:0 beside the weights and what a step takes: lower it.");
    gpu.kept_memory = 10 * mebibyte;
    CHECK_THROWS(plan_caches(Figures(), gpu, {}), "0 MiB may be used");
}

TEST(what_does_not_fit_is_refused_with_the_figures) {
    CacheOptions options;
    options.max_model_len = 4096;
    CHECK_THROWS(plan(options, 28 * mebibyte), "A context of 4096 tokens needs 8 MiB of KV cache and 7 MiB may be used beside 0 MiB of recurrent states: "
                                               "free some memory, set kv_cache_memory, or lower max_model_len.");
    options.max_batch_size = 20;
    CHECK_THROWS(plan(options, 28 * mebibyte), "8 MiB of KV cache and 5 MiB may be used beside 2 MiB of recurrent states: "
                                               "free some memory, set kv_cache_memory, or lower max_model_len or max_batch_size.");
    options = {};
    options.kv_cache_memory = mebibyte;
    CHECK_THROWS(plan(options), "A context of 4096 tokens needs 8 MiB of KV cache and 0 MiB may be used beside 1 MiB of recurrent states: "
                                "raise kv_cache_memory, or lower max_model_len or max_batch_size.");
    CHECK_EQ(field_of(options), std::string("kv_cache_memory"));
    options.kv_cache_memory = 5000 * mebibyte;
    CHECK_THROWS(plan(options), "\"kv_cache_memory\" = 5242880000 is more than the 4096 MiB of memory that cpu has: lower it.");
}

TEST(options_that_make_no_sense) {
    CacheOptions options;
    options.max_model_len = 4097;
    CHECK_THROWS(plan(options), "\"max_model_len\" = 4097 is more than the 4096 tokens that the model was made for: lower it, or leave it out.");
    CHECK_EQ(field_of(options), std::string("max_model_len"));
    options.max_model_len = -1;
    CHECK_THROWS(plan(options), "\"max_model_len\" = -1 is not valid");
    options = {};
    options.max_batch_size = -1;
    CHECK_EQ(field_of(options), std::string("max_batch_size"));
    options = {};
    options.prefill_token_budget = -1;
    CHECK_EQ(field_of(options), std::string("prefill_chunk_tokens"));
    options = {};
    options.kv_cache_dtype = DType::float8_e4m3;
    CHECK_THROWS(plan(options), "\"kv_cache_dtype\" = \"float8_e4m3\" is not valid");
}
