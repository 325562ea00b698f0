#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "arguments.h"
#include "commands.h"
#include "engine/qwen_batch_scheduler.h"
#include "engine/qwen_engine.h"
#include "json_writer.h"
#include "pocket/error.h"
#include "random_checkpoint.h"
#include "read_bandwidth.h"

namespace pocket::launcher {

namespace {

constexpr int most_tokens = 1 << 24, most_batch = 1 << 16;  // that may be asked for

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.size() % 2 == 1 ? values[values.size() / 2] : (values[values.size() / 2 - 1] + values[values.size() / 2]) / 2;
}

// One measure: tokens a second of each repeat, and what reading its bytes would allow.
struct Measure {
    std::string kind;                                       // "prefill" or "decode"
    int batch_size = 1;
    int context = 0;                                        // tokens of each prompt
    int tokens = 0;                                         // of the prompt, or about as many steps of decoding, in a repeat
    std::vector<double> rates;                              // tokens a second
    double bytes_per_step = 0;                              // of weights, keys, values and states that a decode step moves
};

// Rows answered together, and when each got its ids.
class Rows {
public:
    explicit Rows(int count) : times_(static_cast<std::size_t>(count)) {}

    QwenBatchCallbacks callbacks(std::size_t row) {
        QwenBatchCallbacks callbacks;
        callbacks.on_token = [this, row](RequestId, std::int32_t) { times_[row].push_back(Clock::now()); };
        callbacks.on_complete = [this](const QwenBatchResult& result) {
            const std::lock_guard lock(mutex_);
            if (result.finish_reason != FinishReason::length) fault_ = result.error ? result.error : std::make_exception_ptr(Error(ErrorKind::device, "A row of the benchmark ended early."));
            ++num_done_;
            changed_.notify_one();
        };
        return callbacks;
    }

    void wait() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return num_done_ == times_.size(); });
        if (fault_) std::rethrow_exception(fault_);
    }

    // Tokens a second of all rows, from when the last one has its first id until the first one has its last: in between all decode.
    double decode_rate() const {
        Clock::time_point start = times_[0].front(), end = times_[0].back();
        for (const auto& row : times_) {
            start = std::max(start, row.front());
            end = std::min(end, row.back());
        }
        std::ptrdiff_t tokens = 0;
        for (const auto& row : times_) tokens += std::count_if(row.begin(), row.end(), [&](Clock::time_point time) { return time > start && time <= end; });
        return static_cast<double>(tokens) / std::chrono::duration<double>(end - start).count();
    }
    double seconds_to_first(Clock::time_point start) const { return std::chrono::duration<double>(times_[0].front() - start).count(); }

private:
    std::vector<std::vector<Clock::time_point>> times_;     // of each row's ids
    std::mutex mutex_;
    std::condition_variable changed_;
    std::size_t num_done_ = 0;
    std::exception_ptr fault_;
};

class Bench {
public:
    Bench(QwenEngine& engine, int repeats) : engine_(engine), scheduler_(engine, engine.capabilities().max_slots), repeats_(repeats) {}

    Measure prefill(int context) {
        Measure measure{"prefill", 1, context, context, {}, 0};
        for (int repeat = 0; repeat <= repeats_; ++repeat) {
            Rows rows(1);
            const auto start = Clock::now();
            submit(rows, 0, context, 1);
            rows.wait();
            if (repeat > 0) measure.rates.push_back(context / rows.seconds_to_first(start));
        }
        return measure;
    }

    Measure decode(int batch_size, int context, int tokens) {
        Measure measure{"decode", batch_size, context, tokens, {}, bytes_per_step(batch_size, context + tokens / 2)};
        for (int repeat = 0; repeat <= repeats_; ++repeat) {
            Rows rows(batch_size);
            // Rows that join earlier decode beside the others' prompts, so each makes as many tokens more as there may be steps until all have joined.
            const int more = batch_size == 1 ? 0 : batch_size * (context / std::max(1, budget()) + 2);
            for (int row = 0; row < batch_size; ++row) submit(rows, static_cast<std::size_t>(row), context, tokens + more + 1);
            rows.wait();
            if (repeat > 0) measure.rates.push_back(rows.decode_rate());
        }
        return measure;
    }

private:
    int budget() const { return engine_.options().prefill_chunk_tokens > 0 ? engine_.options().prefill_chunk_tokens : std::numeric_limits<int>::max(); }

    void submit(Rows& rows, std::size_t row, int context, int max_new_tokens) {
        std::vector<std::int32_t> prompt(static_cast<std::size_t>(context));
        for (std::size_t place = 0; place < prompt.size(); ++place) {
            prompt[place] = static_cast<std::int32_t>((place * 7919 + row * 104'729 + static_cast<std::size_t>(num_prompts_) * 31) % static_cast<std::size_t>(engine_.config().vocab_size));
        }
        ++num_prompts_;
        QwenBatchSamplingParams sampling;
        sampling.max_new_tokens = max_new_tokens;
        sampling.stop_token_ids.emplace();
        scheduler_.submit_request(std::move(prompt), sampling, rows.callbacks(row));
    }

    // Weights once, and for each row its keys and values read and its state read and written.
    double bytes_per_step(int batch_size, int context) const {
        const QwenConfig& config = engine_.config();
        const double token_bytes = static_cast<double>(config.kv_cache_bytes) / (static_cast<double>(config.kv_blocks) * config.block_size);
        const double slot_bytes = static_cast<double>(config.state_bytes) / (config.max_batch_size + config.state_snapshots);
        return static_cast<double>(config.bytes_per_token) + batch_size * (context * token_bytes + 2 * slot_bytes);
    }

    QwenEngine& engine_;
    QwenBatchScheduler scheduler_;
    int repeats_;
    int num_prompts_ = 0;
};

std::string report(const std::string& what, const QwenConfig& config, double bandwidth, const std::vector<Measure>& measures, bool as_json) {
    if (as_json) {
        JsonWriter json;
        json.begin_object().value("model", what).value("device", config.device).value("device_description", config.device_description);
        json.value("num_threads", config.num_threads).value("dtype", config.dtype).value("kv_cache_dtype", config.kv_cache_dtype);
        json.value("weight_bytes", config.weight_bytes).value("bytes_per_token", config.bytes_per_token).value("read_bytes_per_second", bandwidth).begin_list("measures");
        for (const Measure& one : measures) {
            json.begin_object().value("kind", one.kind).value("batch_size", one.batch_size).value("context", one.context).value("tokens", one.tokens);
            json.value("tokens_per_second", median(one.rates)).begin_list("samples");
            for (const double rate : one.rates) json.value({}, rate);
            json.end_list();
            if (one.bytes_per_step > 0) {
                const double limit = one.batch_size * bandwidth / one.bytes_per_step;
                json.value("bytes_per_step", one.bytes_per_step).value("limit_tokens_per_second", limit).value("of_limit", median(one.rates) / limit);
            }
            json.end_object();
        }
        return json.end_list().end_object().text() + "\n";
    }
    char line[256];
    std::string text = what + " on " + config.device_description + ", " + config.dtype + " weights\n";
    std::snprintf(line, sizeof line, "memory is read at %.1f GB/s\n\n%-10s %6s %8s %12s %12s %9s\n", bandwidth / 1e9, "", "batch", "context", "tokens/s", "limit", "of it");
    text += line;
    for (const Measure& one : measures) {
        const double rate = median(one.rates), limit = one.bytes_per_step > 0 ? one.batch_size * bandwidth / one.bytes_per_step : 0;
        if (limit > 0) {
            std::snprintf(line, sizeof line, "%-10s %6d %8d %12.1f %12.1f %8.0f%%\n", one.kind.c_str(), one.batch_size, one.context, rate, limit, 100 * rate / limit);
        } else {
            std::snprintf(line, sizeof line, "%-10s %6d %8d %12.1f %12s %9s\n", one.kind.c_str(), one.batch_size, one.context, rate, "-", "-");
        }
        text += line;
    }
    return text;
}

}  // namespace

int bench(const Words& words) {
    std::string shapes;
    for (const std::string& name : shape_names()) shapes += (shapes.empty() ? "" : ", ") + name;
    Arguments arguments("bench",
                        "Measure prefill and decode of a checkpoint, or of random bfloat16 weights in a public model's shape. Each figure is the median of the\n"
                        "repeats after one that is not counted. The limit of decoding is the rate at which this memory is read, measured in the same run, over the\n"
                        "bytes of weights, keys, values and states that a step moves.",
                        "[CHECKPOINT]",
                        engine_flags({
                            {"--shape", "NAME", "random weights in place of a checkpoint: " + shapes},
                            {"--scratch", "FOLDER", "where random weights are written until they are loaded [the system's folder for temporary files]"},
                            {"--prefill", "LENGTHS", "prompt lengths to measure [512]"},
                            {"--batch-sizes", "SIZES", "batch sizes to measure decoding at [1,8]"},
                            {"--context", "LENGTHS", "tokens of each prompt before decoding [128]"},
                            {"--decode-tokens", "N", "tokens to decode in a repeat [32]"},
                            {"--repeats", "N", "repeats that count [3]"},
                            {"--json", "", "print one JSON object with every sample"},
                        }));
    arguments.parse(words);
    if (arguments.wants_help()) {
        std::cout << arguments.help();
        return 0;
    }
    if (arguments.positional().has_value() == arguments.has("--shape")) throw UsageError{"pocketllm_engine bench needs a CHECKPOINT or a --shape, and not both."};
    if (const auto names = shape_names(); arguments.has("--shape") && std::find(names.begin(), names.end(), arguments.text("--shape", "")) == names.end()) {
        throw UsageError{"--shape = " + arguments.text("--shape", "") + " is no shape: there are " + shapes + "."};
    }
    const std::vector<int> lengths = arguments.integers("--prefill", {512}, most_tokens), batch_sizes = arguments.integers("--batch-sizes", {1, 8}, most_batch);
    const std::vector<int> contexts = arguments.integers("--context", {128}, most_tokens);
    const int most_context = *std::max_element(contexts.begin(), contexts.end());
    const int tokens = static_cast<int>(arguments.integer("--decode-tokens", 32, 2, 1 << 20));
    const int repeats = static_cast<int>(arguments.integer("--repeats", 3, 1, 1000));
    QwenEngineOptions options = engine_options(arguments);
    options.enable_prefix_caching = false;  // every prompt is to be computed
    const int most_rows = *std::max_element(batch_sizes.begin(), batch_sizes.end());
    if (options.max_batch_size == 0) options.max_batch_size = most_rows;
    if (options.max_model_len == 0) {
        const std::int64_t chunk = options.prefill_chunk_tokens > 0 ? options.prefill_chunk_tokens : std::numeric_limits<int>::max();
        const std::int64_t needed = most_context + tokens + 1 + most_rows * (most_context / chunk + 2);
        options.max_model_len = static_cast<int>(std::clamp<std::int64_t>(needed, *std::max_element(lengths.begin(), lengths.end()) + 1, std::numeric_limits<int>::max()));
    }

    std::optional<RandomCheckpoint> random;
    if (arguments.has("--shape")) {
        const std::string scratch = arguments.text("--scratch", std::filesystem::temp_directory_path().string());
        std::cerr << "writing random weights to " << scratch << std::endl;
        random.emplace(arguments.text("--shape", ""), scratch);
    }
    const std::string what = random ? arguments.text("--shape", "") + " with random weights" : arguments.required_positional();
    QwenEngine engine(random ? random->path() : arguments.required_positional(), options,
                      [](double fraction, const std::string& message) { std::cerr << "\r" << static_cast<int>(100 * fraction) << "% " << message << "\033[K" << std::flush; });
    std::cerr << std::endl;
    random.reset();
    if (engine.capabilities().max_slots < most_rows) {
        throw Error(ErrorKind::configuration, "A batch of " + std::to_string(most_rows) + " rows does not fit: at most " + std::to_string(engine.capabilities().max_slots) + " do. Raise --kv-cache-memory, or lower --batch-sizes.", "batch-sizes");
    }
    // Before and after, since other programs may read too: the larger is nearer to what the memory can do.
    const auto measure_bandwidth = [&] { return device_bandwidth(engine.config().device, engine.config().num_threads, std::max(5, repeats)); };
    double bandwidth = measure_bandwidth();
    std::vector<Measure> measures;
    {
        Bench bench(engine, repeats);
        for (const int length : lengths) measures.push_back(bench.prefill(length));
        for (const int context : contexts) {
            for (const int batch_size : batch_sizes) measures.push_back(bench.decode(batch_size, context, tokens));
        }
    }
    bandwidth = std::max(bandwidth, measure_bandwidth());
    std::cout << report(what, engine.config(), bandwidth, measures, arguments.has("--json"));
    return 0;
}

}  // namespace pocket::launcher
