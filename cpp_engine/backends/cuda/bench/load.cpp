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
#include "engine/qwen_engine.h"
#include "launcher/json_writer.h"

namespace pocket::cuda {

namespace {

constexpr std::int64_t kPieceBytes = 8 << 20;

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

}  // namespace

void measure_load(const std::string& folder) {
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
    const int threads = std::min(8, available_cores());
    const double first = read_seconds(pieces, threads), again = read_seconds(pieces, threads);

    QwenEngineOptions options;
    options.device = "cuda";
    options.max_model_len = 4096;
    options.prefill_chunk_tokens = 2048;
    const auto begin = std::chrono::steady_clock::now();
    double start = 0, weights = 0;                          // seconds until the first layer was there, and until all were
    QwenEngine engine(folder, options, [&](double fraction, const std::string&) {
        if (start == 0) start = seconds_since(begin);
        if (fraction >= 1 && weights == 0) weights = seconds_since(begin);
    });
    const double load = seconds_since(begin);
    engine.generate(std::vector<std::int32_t>(16, 1), 1);
    const double token = seconds_since(begin);

    launcher::JsonWriter json;
    json.begin_object().value("bytes", bytes).value("threads", threads).value("first_read_seconds", first).value("read_seconds", again);
    json.value("read_bytes_per_second", static_cast<double>(bytes) / again).value("first_layer_seconds", start).value("weights_seconds", weights);
    json.value("weights_bytes_per_second", static_cast<double>(bytes) / weights).value("of_read_rate", again / weights).value("load_seconds", load);
    json.value("first_token_seconds", token);
    std::printf("%s\n", json.end_object().text().c_str());
}

}  // namespace pocket::cuda
