// What steps and operators of the Qwen3.5 shapes cost on this GPU, beside the limit that reading the weights sets.
//
//   pocket_cuda_bench 9b [--float8] [--layers N] [--prefill] [--only-prefill] [--table FILE]
//   pocket_cuda_bench --load FOLDER [CONTEXT]
//
// --load reads a checkpoint's files, loads it, and prints both rates and what it answers as JSON, and no more.
// --table measures steps of 1, 8, 32 and 64 rows after 512, 8,192 and, at one row, 2,048 and 131,072 tokens, and no more, and writes them as JSON.
//
// Times are medians of recorded graphs, so the host has no share in them; the weights of all layers pass between two uses of one, so no cache holds them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "backends/cuda/bench/load.h"
#include "backends/cuda/bench/synthetic_model.h"
#include "backends/cuda/make_device.h"
#include "backends/cuda/read_rate.h"
#include "launcher/json_writer.h"
#include "pocket/error.h"

namespace {

using namespace pocket;
using pocket::cuda::SyntheticModel;

double seconds_of(Device& device, const std::function<void()>& work) {
    device.synchronize();
    const auto begin = std::chrono::steady_clock::now();
    work();
    device.synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Of one call of `work`, recorded; the median of several stretches of about 50 ms.
double graph_seconds(Device& device, const std::function<void()>& work) {
    work();
    const std::unique_ptr<Graph> graph = device.capture(work);
    const double once = std::max(1e-6, std::min(seconds_of(device, [&] { graph->replay(); }), seconds_of(device, [&] { graph->replay(); })));
    const int turns = std::clamp(static_cast<int>(0.05 / once), 1, 2000);
    std::vector<double> times;
    for (int stretch = 0; stretch < 5; ++stretch)
        times.push_back(seconds_of(device, [&] {
                            for (int turn = 0; turn < turns; ++turn) graph->replay();
                        }) /
                        turns);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

struct Decode {
    int batch = 0, context = 0;
    double seconds = 0, limit = 0;                          // of a step, measured and allowed by the read rate
};

Decode decode(Device& device, SyntheticModel& model, const cuda::ModelShape& shape, int batch, int context, double rate, int layers) {
    const Step step = model.step(batch, 1, context);
    const double seconds = graph_seconds(device, [&] { model.forward(step); });
    const double kv = 2.0 * (layers / 4) * shape.num_kv_heads * shape.head_dim() * static_cast<double>(item_size(device.info().kv_cache_dtype)) * context * batch;
    const double states = 8.0 * (layers - layers / 4) * static_cast<double>(shape.delta_net().state_size()) * batch;
    const double limit = (static_cast<double>(model.bytes_per_token()) + kv + states) / rate;
    const double eager = seconds_of(device, [&] { model.forward(step); });
    std::printf("decode  batch %3d context %6d: %8.3f ms, %8.1f tok/s, %5.1f%% of the limit %7.3f ms; launched one by one %8.3f ms\n", batch, context, seconds * 1e3, batch / seconds,
                100 * limit / seconds, limit * 1e3, eager * 1e3);
    std::fflush(stdout);
    return {batch, context, seconds, limit};
}

void write_table(const std::string& file, const cuda::ModelShape& shape, bool is_float8, double rate, const SyntheticModel& model, const std::vector<Decode>& table) {
    launcher::JsonWriter json;
    json.begin_object().value("shape", shape.name).value("weights", is_float8 ? "float8_e4m3" : "bfloat16").value("read_bytes_per_second", rate);
    json.value("bytes_per_token", model.bytes_per_token()).begin_list("decode_steps");
    for (const Decode& one : table) {
        json.begin_object().value("batch_size", one.batch).value("context", one.context).value("seconds", one.seconds).value("tokens_per_second", one.batch / one.seconds);
        json.value("limit_tokens_per_second", one.batch / one.limit).value("of_limit", one.limit / one.seconds).end_object();
    }
    std::ofstream out(file);
    out << json.end_list().end_object().text() << "\n";
    if (!out.flush()) throw Error(ErrorKind::configuration, "--table = " + file + " can't be written.");
}

void parts(Device& device, SyntheticModel& model, int batch, int context, double rate) {
    const Step step = model.step(batch, 1, context);
    for (const char* which : {"in", "delta", "attention", "out", "gate_up", "down", "head"}) {
        int count = 1;
        const double seconds = graph_seconds(device, [&] { count = model.run_part(which, step); });
        if (count == 0) continue;
        const double bytes = static_cast<double>(model.part_bytes(which));
        std::printf("  %-10s batch %2d: %8.2f us", which, batch, seconds / count * 1e6);
        if (bytes > 0) std::printf(", %6.3f TB/s, %5.1f%% of the read rate", bytes / seconds * 1e-12, 100 * bytes / seconds / rate);
        std::printf("\n");
    }
    std::fflush(stdout);
}

void prefill(Device& device, SyntheticModel& model, int rows, int tokens, double flops_per_token) {
    const Step step = model.step(rows, tokens, tokens);
    model.forward(step);
    std::vector<double> times;
    for (int turn = 0; turn < 3; ++turn) times.push_back(seconds_of(device, [&] { model.forward(step); }));
    std::sort(times.begin(), times.end());
    std::printf("prefill %3d x %6d: %9.2f ms, %9.0f tok/s, %6.1f TFLOP/s of products\n", rows, tokens, times[1] * 1e3, rows * tokens / times[1],
                flops_per_token * rows * tokens / times[1] * 1e-12);
    for (const char* which : {"in", "delta", "attention", "out", "gate_up", "down"}) {
        int count = 1;
        const double seconds = seconds_of(device, [&] { count = model.run_part(which, step); });
        if (count > 0) std::printf("  %-10s %8.3f ms a layer, %8.2f ms in all\n", which, seconds / count * 1e3, seconds * 1e3);
    }
    std::fflush(stdout);
}

void draws(Device& device, int batch, int vocab_size) {
    std::vector<float> values(static_cast<std::size_t>(batch) * vocab_size);
    std::uint64_t state = 9;
    for (float& value : values) state = state * 6364136223846793005ull + 1442695040888963407ull, value = static_cast<float>(state >> 40) * 0x1p-22f;
    const auto buffer = device.allocate(values.size() * sizeof(float));
    device.upload(buffer->data(), values.data(), buffer->num_bytes());
    const Tensor logits = {buffer->data(), DType::float32, batch, vocab_size, vocab_size};
    const auto count = static_cast<std::size_t>(batch);
    const std::vector<std::int32_t> numbers(count, 0);
    const std::vector<std::uint64_t> seeds(count, 5);
    const std::vector<const std::uint32_t*> masks(count, nullptr);
    std::vector<SampleOutput> outputs(count);
    const auto time = [&](const char* what, float temperature, float top_p, int top_k, int ranks) {
        const std::vector<float> temperatures(count, temperature), top_ps(count, top_p);
        const std::vector<std::int32_t> top_ks(count, top_k), num_logprobs(count, ranks);
        const SampleInputs inputs = {temperatures, top_ps, top_ks, seeds, numbers, num_logprobs, masks};
        device.sample(logits, inputs, outputs);
        const double seconds = seconds_of(device, [&] {
            for (int turn = 0; turn < 20; ++turn) device.sample(logits, inputs, outputs);
        });
        std::printf("  draw %-28s batch %2d: %8.1f us\n", what, batch, seconds / 20 * 1e6);
    };
    time("greedy", 0, 1, 0, -1);
    time("temperature 1", 1, 1, 0, -1);
    time("top_k 50, top_p 0.9", 1, 0.9f, 50, -1);
    time("top_p 0.9", 1, 0.9f, 0, -1);
    time("greedy, 20 alternatives", 0, 1, 0, 20);
    std::fflush(stdout);
}

int run(int count, char** arguments) {
    std::string name = "9b", table;
    bool is_float8 = false, with_prefill = false, with_decode = true;
    int layers = 0;
    if (count >= 3 && !std::strcmp(arguments[1], "--load")) {
        cuda::measure_load(arguments[2], count > 3 ? std::stoi(arguments[3]) : 131072);
        return 0;
    }
    for (int index = 1; index < count; ++index) {
        if (!std::strcmp(arguments[index], "--float8")) is_float8 = true;
        else if (!std::strcmp(arguments[index], "--prefill")) with_prefill = true;
        else if (!std::strcmp(arguments[index], "--table") && index + 1 < count) table = arguments[++index];
        else if (!std::strcmp(arguments[index], "--only-prefill")) with_prefill = true, with_decode = false;
        else if (!std::strcmp(arguments[index], "--layers") && index + 1 < count) layers = std::stoi(arguments[++index]);
        else name = arguments[index];
    }
    const cuda::ModelShape shape = cuda::model_shape(name);
    const int num_layers = layers > 0 ? layers : shape.num_layers;
    const std::unique_ptr<Device> device = cuda::make_device(0);
    std::printf("%s, shape %s, %s weights, %d layers\n", device->info().description.c_str(), name.c_str(), is_float8 ? "float8_e4m3" : pocket::name(device->info().activation_dtype), num_layers);
    const double rate = cuda::read_rate(0, std::size_t{4} << 30);
    std::printf("read rate %.3f TB/s\n", rate * 1e-12);
    const bool is_table = !table.empty();
    const int context = 8192, batch = is_table ? 64 : 32, tokens = with_prefill ? 8192 : 64;
    std::unique_ptr<SyntheticModel> model;
    const double load = seconds_of(*device, [&] { model = std::make_unique<SyntheticModel>(*device, shape, is_float8, layers, batch, context, tokens); });
    std::printf("loaded in %.1f s, %.3f GB of weights a token, limit %.1f tok/s at batch 1\n", load, static_cast<double>(model->bytes_per_token()) * 1e-9,
                rate / static_cast<double>(model->bytes_per_token()));
    if (is_table) {
        std::vector<Decode> all;
        for (const auto& [rows, length] : {std::pair{1, 2048}, {1, 512}, {8, 512}, {32, 512}, {64, 512}, {1, 8192}, {8, 8192}, {32, 8192}, {64, 8192}})
            all.push_back(decode(*device, *model, shape, rows, length, rate, num_layers));
        model.reset();
        model = std::make_unique<SyntheticModel>(*device, shape, is_float8, layers, 1, 131072, 64);
        all.push_back(decode(*device, *model, shape, 1, 131072, rate, num_layers));
        write_table(table, shape, is_float8, rate, *model, all);
        return 0;
    }
    if (with_decode) {
        decode(*device, *model, shape, 1, 2048, rate, num_layers);
        parts(*device, *model, 1, 2048, rate);
        for (const int rows : {8, 32}) decode(*device, *model, shape, rows, 512, rate, num_layers);
        parts(*device, *model, 8, 512, rate);
        decode(*device, *model, shape, 1, 8192, rate, num_layers);
        decode(*device, *model, shape, 32, 8192, rate, num_layers);
    }
    draws(*device, 1, shape.vocab_size());
    draws(*device, 32, shape.vocab_size());
    if (with_prefill) {
        const double weights = static_cast<double>(model->bytes_per_token() - model->part_bytes("head")) / (is_float8 ? 1 : 2);
        prefill(*device, *model, 1, 512, 2 * weights);
        prefill(*device, *model, 1, 8192, 2 * weights);
        prefill(*device, *model, 16, 512, 2 * weights);
    }
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    try {
        return run(count, arguments);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
