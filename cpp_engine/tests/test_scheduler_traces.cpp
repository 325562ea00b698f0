// The scheduler against the traces that every plane's scheduler replays: tests/traces/README.md describes them.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/json.h"
#include "engine/scheduler.h"
#include "tests/check.h"

namespace {

using pocket::Json;
using pocket::Row;

// A misspelt expectation would never be checked.
const Json& require(const Json& object, const std::string& key) {
    const Json* found = object.find(key);
    if (found == nullptr) throw std::runtime_error("the key \"" + key + "\" is missing");
    return *found;
}

void refuse_other_keys(const Json& object, const std::set<std::string>& known) {
    for (const auto& [key, value] : object.object()) {
        if (!known.contains(key)) throw std::runtime_error("the key \"" + key + "\" is unknown");
    }
}

int to_int(const Json& value) { return static_cast<int>(value.integer()); }

std::vector<std::int32_t> to_ids(const Json& value) {
    std::vector<std::int32_t> ids;
    for (const Json& id : value.array()) ids.push_back(static_cast<std::int32_t>(id.integer()));
    return ids;
}

// Plays one trace, and checks each step.
class Replay {
public:
    explicit Replay(const Json& trace) : trace_(trace) {
        refuse_other_keys(trace, {"description", "options", "requests", "steps"});
        const Json& options = require(trace, "options");
        refuse_other_keys(options, {"num_blocks", "block_size", "max_batch_size", "prefill_chunk_tokens", "prefill_chunk_beside_answers", "runs_ahead",
                                    "enable_prefix_caching", "num_snapshots", "interval_blocks"});
        pocket::CacheShape cache;
        cache.block_size = to_int(require(options, "block_size"));
        cache.num_blocks = to_int(require(options, "num_blocks"));
        cache.num_row_slots = to_int(require(options, "max_batch_size"));
        is_hybrid_ = options.find("num_snapshots") != nullptr;
        if (is_hybrid_) {
            cache.num_snapshot_slots = to_int(require(options, "num_snapshots"));
            cache.snapshot_interval = to_int(require(options, "interval_blocks")) * cache.block_size;
        }
        pocket::SchedulerOptions own;
        own.max_batch_size = cache.num_row_slots;
        own.prefill_token_budget = to_int(require(options, "prefill_chunk_tokens"));
        const Json& beside = require(options, "prefill_chunk_beside_answers");
        own.prefill_budget_beside_answers = beside.is_null() ? 0 : to_int(beside);
        own.enable_prefix_caching = require(options, "enable_prefix_caching").boolean();
        runs_ahead_ = require(options, "runs_ahead").boolean();
        scheduler_.emplace(cache, own);
        for (const auto& [name, request] : require(trace, "requests").object()) {
            refuse_other_keys(request, {"prompt_token_ids", "max_tokens", "eos_token_ids", "draws", "cached_tokens", "priority", "ranks_prompt"});
            names_.push_back(name);
        }
    }

    void run() {
        int number = 0;
        for (const Json& step : require(trace_, "steps").array()) {
            refuse_other_keys(step, {"add", "cancel", "rows", "preempted", "finished", "blocks_used", "copies"});
            where_ = "step " + std::to_string(number++) + " ";
            play(step);
        }
        for (const std::string& name : names_) {
            const auto cached = rows_.at(name)->cached_tokens;
            expect(name + " cached_tokens", cached ? std::to_string(*cached) : "null", require(request(name), "cached_tokens").text());
        }
        CHECK_EQ(scheduler_->pool().num_used(), 0);
    }

private:
    struct Flight {
        pocket::StepPlan step;
        std::vector<std::int32_t> drawn;
    };

    void play(const Json& step) {
        for (const Json& name : require(step, "add").array()) add(name.string());
        for (const Json& name : require(step, "cancel").array()) scheduler_->remove(rows_.at(name.string()));
        const auto running = scheduler_->running();
        pocket::StepPlan scheduled;
        if (!flying_ || scheduler_->can_run_ahead()) scheduled = scheduler_->schedule();
        std::string copies;
        if (!scheduled.empty()) {
            for (const auto& [from, to] : scheduler_->take_copies()) append(copies, pair(from < 0 ? "null" : std::to_string(from), std::to_string(to)));
        }
        scheduler_->check_integrity();
        std::string chosen, preempted;
        Flight flight{scheduled, {}};
        for (const auto& [row, num_tokens, samples] : scheduled) {
            append(chosen, pair(quoted(name_of(row)), std::to_string(num_tokens)));
            const auto place = static_cast<std::size_t>(row->num_generated());
            flight.drawn.push_back(samples ? static_cast<std::int32_t>(require(request(name_of(row)), "draws").array().at(place).integer()) : -1);
        }
        for (auto row = running.rbegin(); row != running.rend(); ++row) {
            if (std::ranges::count(scheduler_->waiting(), *row) > 0) append(preempted, quoted(name_of(*row)));
        }
        std::vector<pocket::RowUpdate> updates;
        if (flying_) {
            updates = scheduler_->resolve(flying_->step, flying_->drawn);
            flying_.reset();
        }
        if (!scheduled.empty()) {
            scheduler_->advance(scheduled);
            scheduler_->check_integrity();
            if (runs_ahead_) {
                flying_ = flight;
            } else {
                updates = scheduler_->resolve(flight.step, flight.drawn);
            }
        }
        scheduler_->check_integrity();
        std::string finished;
        for (const auto& update : updates) {
            if (update.finish_reason) append(finished, pair(quoted(name_of(update.row)), quoted(pocket::name(*update.finish_reason))));
        }
        expect("rows", list(chosen), require(step, "rows").text());
        expect("preempted", list(preempted), require(step, "preempted").text());
        expect("finished", list(finished), require(step, "finished").text());
        expect("blocks_used", std::to_string(scheduler_->pool().num_used()), require(step, "blocks_used").text());
        if (is_hybrid_) expect("copies", list(copies), require(step, "copies").text());
    }

    void add(const std::string& name) {
        const Json& given = request(name);
        pocket::Request request;
        request.prompt_token_ids = to_ids(require(given, "prompt_token_ids"));
        request.max_tokens = to_int(require(given, "max_tokens"));
        request.stop_token_ids = to_ids(require(given, "eos_token_ids"));
        if (const Json* priority = given.find("priority")) request.priority = to_int(*priority);
        if (const Json* ranks = given.find("ranks_prompt"); ranks && ranks->boolean()) request.prompt_logprobs = 0;
        const auto id = static_cast<pocket::RequestId>(std::ranges::find(names_, name) - names_.begin());
        scheduler_->add(rows_[name] = std::make_shared<Row>(id, std::move(request)));
    }

    const Json& request(const std::string& name) const { return require(require(trace_, "requests"), name); }
    const std::string& name_of(const std::shared_ptr<Row>& row) const { return names_.at(row->id); }

    static std::string list(const std::string& items) { return std::string("[").append(items).append("]"); }
    static std::string pair(const std::string& first, const std::string& second) { return list(std::string(first).append(",").append(second)); }
    static std::string quoted(const std::string& text) { return std::string("\"").append(text).append("\""); }
    static void append(std::string& items, const std::string& item) { items.append(items.empty() ? "" : ",").append(item); }

    void expect(const std::string& what, std::string found, std::string wanted) {
        std::erase(found, ' ');
        std::erase(wanted, ' ');
        if (found != wanted) throw std::runtime_error(where_ + what + ": " + found + " is not " + wanted);
    }

    const Json& trace_;
    bool is_hybrid_ = false, runs_ahead_ = false;
    std::optional<pocket::Scheduler> scheduler_;
    std::vector<std::string> names_;
    std::map<std::string, std::shared_ptr<Row>> rows_;
    std::optional<Flight> flying_;
    std::string where_;
};

std::filesystem::path folder() { return std::filesystem::path(POCKET_REPOSITORY) / "tests" / "traces" / "scheduler"; }

std::string read(const std::filesystem::path& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void replay(const std::string& text, const std::string& source) {
    const Json trace = Json::parse(text, source);
    Replay(trace).run();
}

TEST(every_trace_is_replayed) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder())) {
        if (entry.path().extension() != ".json") continue;
        names.insert(entry.path().stem().string());
        try {
            replay(read(entry.path()), entry.path().filename().string());
        } catch (const std::exception& error) {
            pocket::check::fail(entry.path().c_str(), 1, error.what());
        }
    }
    for (const char* name : {"single", "staggered_batch", "chunked_prefill", "preemption", "prefix_reuse", "cancel", "chunks_beside_answers", "ahead",
                             "ahead_preemption", "hybrid_ahead", "hybrid_snapshots", "hybrid_conversation", "hybrid_preemption", "hybrid_eviction",
                             "hybrid_long_prompt", "priority", "ranked_prompt"}) {
        if (!names.contains(name)) pocket::check::fail(name, 1, "there is no such trace");
    }
}

TEST(a_wrong_expectation_is_noticed) {
    std::string text = read(folder() / "single.json");
    text.replace(text.find("\"blocks_used\": 2"), 16, "\"blocks_used\": 3");
    CHECK_THROWS(replay(text, "single.json"), "blocks_used: 2 is not 3");
}

TEST(an_unknown_key_is_refused) {
    std::string text = read(folder() / "single.json");
    text.replace(text.find("\"preempted\""), 11, "\"preemted\"");
    CHECK_THROWS(replay(text, "single.json"), "preemted");
}

}  // namespace
