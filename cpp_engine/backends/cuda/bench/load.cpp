#include "backends/cuda/bench/load.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <vector>

#include "backends/cuda/call.h"
#include "core/cores.h"
#include "core/mapped_file.h"
#include "core/thread_pool.h"
#include "engine/qwen_batch_scheduler.h"
#include "engine/qwen_engine.h"
#include "launcher/json_writer.h"

namespace pocket::cuda {

namespace {

constexpr std::int64_t kPieceBytes = 8 << 20;
constexpr int kPromptTokens = 8192, kAnswerTokens = 128, kAppendedTokens = 512;

double seconds_since(std::chrono::steady_clock::time_point begin) { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); }

struct Piece {
    const MappedFile* file;
    std::int64_t offset, bytes;
};

// Of one pass over all pieces, by `threads` threads with a buffer of pinned memory each.
double read_seconds(const std::vector<Piece>& pieces, int threads) {
    ThreadPool pool(threads);
    std::byte* pinned = nullptr;
    call(cudaHostAlloc(reinterpret_cast<void**>(&pinned), static_cast<std::size_t>(kPieceBytes * pool.size()), cudaHostAllocDefault), "pinned memory");
    const auto begin = std::chrono::steady_clock::now();
    pool.parallel_for(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t first, std::int64_t last, int thread) {
        for (; first < last; ++first) {
            const Piece& piece = pieces[static_cast<std::size_t>(first)];
            for (std::int64_t done = 0; done < piece.bytes;) {
                const ssize_t count = pread(piece.file->descriptor(), pinned + thread * kPieceBytes + done, static_cast<std::size_t>(piece.bytes - done), piece.offset + done);
                if (count <= 0) throw Error(ErrorKind::configuration, piece.file->path() + " can't be read.");
                done += count;
            }
        }
    });
    const double seconds = seconds_since(begin);
    cudaFreeHost(pinned);
    return seconds;
}

struct Answer {
    int computed = 0;                                       // prompt tokens that no cache had
    double seconds_to_first = 0, decode_rate = 0;           // tokens a second, the host's share included
};

// A prompt of `length` ids, the same ones for the same `seed`, and `count` tokens more.
Answer ask(QwenBatchScheduler& scheduler, int length, int seed, int count) {
    std::vector<std::int32_t> ids;
    for (int place = 0; place < length; ++place) ids.push_back(static_cast<std::int32_t>((place * 7919LL + seed * 104729LL) % 100000));
    QwenBatchSamplingParams sampling;
    sampling.max_new_tokens = count;
    sampling.stop_token_ids.emplace();
    std::vector<double> times;                              // written on the engine's thread, read once the row has ended
    QwenBatchCallbacks callbacks;
    const auto begin = std::chrono::steady_clock::now();
    callbacks.on_token = [&](RequestId, std::int32_t) { times.push_back(seconds_since(begin)); };
    const auto result = scheduler.poll_result(scheduler.submit_request(ids, sampling, callbacks), 120'000);
    if (!result || times.empty() || static_cast<int>(times.size()) != count) throw Error(ErrorKind::device, "A row of the benchmark ended early.");
    Answer answer{length - result->usage.cached_tokens, times.front(), 0};
    if (count > 1) answer.decode_rate = (count - 1) / (times.back() - times.front());
    return answer;
}

}  // namespace

void measure_load(const std::string& folder, int context) {
    std::vector<MappedFile> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
        if (entry.path().extension() == ".safetensors") files.emplace_back(entry.path());
    std::vector<Piece> pieces;
    std::int64_t bytes = 0;
    for (const MappedFile& file : files) {
        const auto size = static_cast<std::int64_t>(file.bytes().size());
        for (std::int64_t at = 0; at < size; at += kPieceBytes) pieces.push_back({&file, at, std::min(kPieceBytes, size - at)});
        bytes += size;
    }
    int threads = 1;
    double first = 0, again = 0;                            // seconds of the first pass, and of the fastest one after it
    for (const int count : {8, 8, 16, 16}) {
        const double seconds = read_seconds(pieces, std::min(count, available_cores()));
        if (first == 0) {
            first = seconds;
        } else if (again == 0 || seconds < again) {
            again = seconds, threads = std::min(count, available_cores());
        }
    }

    QwenEngineOptions options;
    options.device = "cuda";
    options.max_model_len = std::max(context, kPromptTokens) + kAnswerTokens;
    options.max_batch_size = 4;
    options.prefill_chunk_tokens = 8192;
    const auto begin = std::chrono::steady_clock::now();
    double start = 0, weights = 0;                          // seconds until the first layer was there, and until all were
    QwenEngine engine(folder, options, [&](double fraction, const std::string&) {
        if (start == 0) start = seconds_since(begin);
        if (fraction >= 1 && weights == 0) weights = seconds_since(begin);
    });
    const double load = seconds_since(begin);
    engine.generate(std::vector<std::int32_t>(16, 1), 1);
    const double token = seconds_since(begin);

    QwenBatchScheduler scheduler(engine, 4);
    ask(scheduler, kPromptTokens, 3, kAnswerTokens);        // records its steps
    const Answer prompt = ask(scheduler, kPromptTokens, 4, kAnswerTokens);
    ask(scheduler, context - kAppendedTokens, 5, 1);
    const Answer append = ask(scheduler, context, 5, kAnswerTokens);

    launcher::JsonWriter json;
    json.begin_object().value("bytes", bytes).value("threads", threads).value("first_read_seconds", first).value("read_seconds", again);
    json.value("read_bytes_per_second", static_cast<double>(bytes) / again).value("first_layer_seconds", start).value("weights_seconds", weights);
    json.value("weights_bytes_per_second", static_cast<double>(bytes) / weights).value("of_read_rate", again / weights).value("load_seconds", load);
    json.value("first_token_seconds", token).value("snapshot_interval", engine.config().snapshot_interval);
    const auto write = [&](const char* name, const Answer& answer, int tokens) {
        json.begin_object(name).value("tokens", tokens).value("computed", answer.computed).value("first_token_seconds", answer.seconds_to_first);
        json.value("decode_tokens_per_second", answer.decode_rate).end_object();
    };
    write("prompt", prompt, kPromptTokens);
    write("append", append, context);
    std::printf("%s\n", json.end_object().text().c_str());
}

}  // namespace pocket::cuda
