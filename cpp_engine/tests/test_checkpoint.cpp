// io/checkpoint and io/eos: files, shards and who takes what.
#include "io/checkpoint.h"

#include <string>

#include "check.h"
#include "io/eos.h"
#include "pocket/error.h"
#include "tiny_checkpoint.h"

using namespace pocket;
namespace fs = std::filesystem;

namespace {

StoredTensor ones(std::int64_t count) { return store(std::vector<float>(static_cast<std::size_t>(count), 1), {count}, "F32"); }

void write_config(const fs::path& folder, const std::string& text = R"({"model_type": "qwen3_5_text"})") { write_file(folder / "config.json", text); }

void write_index(const fs::path& folder, const std::string& map) { write_file(folder / "model.safetensors.index.json", "{\"weight_map\": {" + map + "}}"); }

}  // namespace

TEST(taking_skipping_and_what_is_left) {
    const TemporaryFolder folder;
    write_config(folder.path());
    const StoredTensors tensors{{"a", ones(2)}, {"mtp.a", ones(1)}, {"mtp.b", ones(1)}, {"mtq", ones(1)}, {"z", ones(3)}};
    write_file(folder.path() / "model.safetensors", safetensors_bytes(tensors));
    Checkpoint checkpoint(folder.path());
    const std::string file = (folder.path() / "model.safetensors").string();
    CHECK_EQ(checkpoint.architecture(), std::string("qwen3_5_text"));
    CHECK(checkpoint.has_prefix("mtp."));
    CHECK(!checkpoint.has_prefix("b"));
    CHECK_EQ(checkpoint.skip("mtp."), 2);
    CHECK_EQ(checkpoint.take("a", {2}).name, std::string("a"));
    CHECK_EQ(checkpoint.num_taken(), 3u);
    CHECK_EQ(checkpoint.leftovers(), (std::vector<std::string>{"mtq", "z"}));
    CHECK_THROWS(checkpoint.check_leftovers(), file + " holds the tensor mtq and 1 more tensor, which a qwen3_5_text model has no place for");
    CHECK_THROWS(checkpoint.take("z", {1, 3}), file + " has the tensor z of the shape [3] where config.json asks for [1, 3]");
    CHECK_THROWS(checkpoint.take("b", {1}), file + " lacks the tensor b: download or convert the model again.");
    checkpoint.take("mtq", {1});
    CHECK_THROWS(checkpoint.check_leftovers(), "holds the tensor z, which");
    checkpoint.take("z", {3});
    checkpoint.check_leftovers();
    CHECK_EQ(checkpoint.tensors().size(), 5u);
}

TEST(shards) {
    const TemporaryFolder folder;
    write_config(folder.path());
    write_file(folder.path() / "1.safetensors", safetensors_bytes({{"a", ones(2)}}));
    write_file(folder.path() / "2.safetensors", safetensors_bytes({{"b", ones(3)}}));
    write_index(folder.path(), R"("a": "1.safetensors", "b": "2.safetensors")");
    Checkpoint checkpoint(folder.path());
    CHECK_EQ(checkpoint.take("a", {2}).file, (folder.path() / "1.safetensors").string());
    CHECK_EQ(checkpoint.take("b", {3}).file, (folder.path() / "2.safetensors").string());
    CHECK_EQ(reinterpret_cast<const float*>(checkpoint.find("b")->data)[2], 1.0f);
    CHECK_THROWS(checkpoint.take("c", {1}), folder.path().string() + " lacks the tensor c");

    write_index(folder.path(), R"("a": "1.safetensors", "b": "1.safetensors")");
    const std::string index = (folder.path() / "model.safetensors.index.json").string();
    CHECK_THROWS(Checkpoint{folder.path()}, "1.safetensors lacks the tensor b, which " + index + " places there");
    write_index(folder.path(), R"("a": "1.safetensors", "b": "3.safetensors")");
    CHECK_THROWS(Checkpoint{folder.path()}, "lacks 3.safetensors, which its index names for the tensor b");
    write_index(folder.path(), R"("a": "2.safetensors", "b": "1.safetensors")");
    CHECK_THROWS(Checkpoint{folder.path()}, "lacks the tensor a");
    for (const char* file : {"../1.safetensors", "/1.safetensors", "1/..", ".."}) {
        write_index(folder.path(), R"("a": ")" + std::string(file) + R"(")");
        CHECK_THROWS(Checkpoint{folder.path()}, "names '" + std::string(file) + "' for the tensor a, which is no file of its directory");
    }
    for (const char* map : {R"("a": 1)", R"("a": "")"}) {
        write_index(folder.path(), map);
        CHECK_THROWS(Checkpoint{folder.path()}, "model.safetensors.index.json is no valid index");
    }
    write_file(folder.path() / "model.safetensors.index.json", "{}");
    CHECK_THROWS(Checkpoint{folder.path()}, "model.safetensors.index.json is no valid index");
}

TEST(a_tensor_in_two_shards) {
    const TemporaryFolder folder;
    write_config(folder.path());
    write_file(folder.path() / "1.safetensors", safetensors_bytes({{"a", ones(2)}}));
    write_file(folder.path() / "2.safetensors", safetensors_bytes({{"a", ones(2)}, {"b", ones(1)}}));
    write_index(folder.path(), R"("a": "1.safetensors", "b": "2.safetensors")");
    const std::string words = "The tensor a is in both " + (folder.path() / "1.safetensors").string() + " and " + (folder.path() / "2.safetensors").string();
    CHECK_THROWS(Checkpoint{folder.path()}, words);
    fs::remove(folder.path() / "model.safetensors.index.json");
    CHECK_THROWS(Checkpoint{folder.path()}, words);  // without an index every file counts
    write_file(folder.path() / "model.safetensors", safetensors_bytes({{"a", ones(2)}}));
    CHECK_EQ(Checkpoint{folder.path()}.tensors().size(), 1u);  // but model.safetensors goes before the others
}

TEST(a_truncated_shard) {
    const TemporaryFolder folder;
    TinyCheckpoint tiny;
    tiny.make();
    tiny.write(folder.path(), 3);
    CHECK_EQ(Checkpoint{folder.path()}.tensors().size(), tiny.tensors.size());
    fs::resize_file(folder.path() / "model-1.safetensors", fs::file_size(folder.path() / "model-1.safetensors") - 5);
    CHECK_THROWS(Checkpoint{folder.path()}, (folder.path() / "model-1.safetensors").string() + " is truncated: the tensor ");
}

TEST(folders_that_hold_no_checkpoint) {
    const TemporaryFolder folder;
    CHECK_THROWS(Checkpoint{folder.path() / "absent"}, "absent does not exist");
    CHECK_THROWS(Checkpoint{folder.path()}, folder.path().string() + " has no config.json");
    write_config(folder.path());
    CHECK_THROWS(Checkpoint{folder.path()}, folder.path().string() + " has no .safetensors file");
    CHECK_THROWS(Checkpoint{folder.path() / "config.json"}, "config.json is no folder");
    write_file(folder.path() / "m.gguf", "x");
    CHECK_THROWS(Checkpoint{folder.path()}, "It has .gguf files");
    write_config(folder.path(), "{}");
    CHECK_THROWS(Checkpoint{folder.path()}, "config.json lacks the key model_type");
    write_config(folder.path(), "[1]");
    CHECK_THROWS(Checkpoint{folder.path()}, "config.json holds no JSON object");
    write_config(folder.path(), "{\"model_type\": ");
    CHECK_THROWS(Checkpoint{folder.path()}, "config.json is not valid JSON (it ends too early, at byte 15)");
}

TEST(config_of_the_text_model_goes_before_the_top_level) {
    const TemporaryFolder folder;
    write_config(folder.path(), R"({"model_type": "qwen3_5", "a": 1, "b": 2, "c": 3, "text_config": {"model_type": "qwen3_5_text", "b": 4, "c": null}})");
    write_file(folder.path() / "model.safetensors", safetensors_bytes({{"a", ones(2)}}));
    const Checkpoint checkpoint(folder.path());
    CHECK_EQ(checkpoint.architecture(), std::string("qwen3_5"));
    CHECK_EQ(checkpoint.config("a")->integer(), 1);
    CHECK_EQ(checkpoint.config("b")->integer(), 4);
    CHECK(checkpoint.config("c") == nullptr);
    CHECK(checkpoint.config("d") == nullptr);
}

TEST(ids_that_end_an_answer) {
    const TemporaryFolder folder;
    write_file(folder.path() / "model.safetensors", safetensors_bytes({{"a", ones(2)}}));
    using Ids = std::vector<std::int32_t>;
    write_config(folder.path());
    CHECK_EQ(read_eos_ids(Checkpoint{folder.path()}).source, std::string("none"));
    CHECK_EQ(read_eos_ids(Checkpoint{folder.path()}).token_ids, Ids{});
    write_config(folder.path(), R"({"model_type": "qwen3_5", "text_config": {"eos_token_id": 7}})");
    CHECK_EQ(read_eos_ids(Checkpoint{folder.path()}).token_ids, Ids{7});
    write_config(folder.path(), R"({"model_type": "qwen3_5", "eos_token_id": 8, "text_config": {"eos_token_id": 7}})");
    CHECK_EQ(read_eos_ids(Checkpoint{folder.path()}).token_ids, Ids{8});
    write_file(folder.path() / "generation_config.json", R"({"eos_token_id": null})");
    CHECK_EQ(read_eos_ids(Checkpoint{folder.path()}).token_ids, Ids{8});
    write_file(folder.path() / "generation_config.json", R"({"eos_token_id": [5, 6]})");
    CHECK_EQ(read_eos_ids(Checkpoint{folder.path()}).token_ids, (Ids{5, 6}));
    CHECK_EQ(read_eos_ids(Checkpoint{folder.path()}).source, std::string("generation_config.json"));
    for (const char* value : {"-1", "\"x\"", "[1, -2]", "[1.0]", "true", "4294967296", "{}"}) {
        write_file(folder.path() / "generation_config.json", std::string("{\"eos_token_id\": ") + value + "}");
        CHECK_THROWS(read_eos_ids(Checkpoint{folder.path()}), "generation_config.json has eos_token_id = ");
    }
}
