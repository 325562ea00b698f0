#include "bindings.h"
#include "value_type.h"

namespace pocket::python {

void bind_options(py::module_& module) {
    using Options = QwenEngineOptions;
    ValueType<Options>(module, "QwenEngineOptions", "How an engine is made. Every field has a default and may be given by keyword.", true)
        .field("device", &Options::device, "\"cpu\", \"cuda\", \"cuda:N\", or \"auto\" for the best that is there")
        .field("dtype", &Options::dtype, "of the weights: \"float32\", \"bfloat16\", \"float16\", or \"auto\" for as they are stored")
        .field("kv_cache_dtype", &Options::kv_cache_dtype, "\"float32\", \"bfloat16\", \"float16\", or \"auto\" for the device's default")
        .field("max_model_len", &Options::max_model_len, "most tokens of prompt and answer together; 0 is what the model was made for, or what fits")
        .field("max_batch_size", &Options::max_batch_size, "most running requests; 0 is 8, on a GPU 64, or fewer where memory is short")
        .field("kv_cache_memory", &Options::kv_cache_memory, "bytes of cached keys, values and states; 0 is room for all, at most a quarter of free memory, on a GPU 95%")
        .field("num_threads", &Options::num_threads, "of the CPU device; 0 is every core that the process may use")
        .field("prefill_chunk_tokens", &Options::prefill_chunk_tokens, "most prompt tokens a step; 0 computes each prompt in one step")
        .field("enable_prefix_caching", &Options::enable_prefix_caching, "reuse what prompts have in common")
        .field("tensor_parallel_size", &Options::tensor_parallel_size, "ranks that share the model, each a process of this machine with an engine of its own")
        .field("tensor_parallel_rank", &Options::tensor_parallel_rank, "this one; rank 0 takes requests, the others follow()")
        .field("rendezvous_dir", &Options::rendezvous_dir, "of this run alone, where ranks meet")
        .field("seed", &Options::seed, "of requests without a seed of their own, repeatable in their order of arrival");

    using Caps = EngineCaps;
    ValueType<Caps>(module, "EngineCaps", "What an engine does: facts to branch on.", false)
        .field("max_slots", &Caps::max_slots, "most running requests")
        .field("continuous_batching", &Caps::continuous_batching, "requests join and leave a running batch")
        .field("chunked_prefill", &Caps::chunked_prefill, "long prompts are computed in pieces between decode steps")
        .field("paged_kv", &Caps::paged_kv, "keys and values lie in blocks that requests share")
        .field("per_request_sampling", &Caps::per_request_sampling, "temperature, top_p and seed are the request's own")
        .field("per_request_top_k", &Caps::per_request_top_k, "so is top_k")
        .field("prefix_caching", &Caps::prefix_caching, "an equal beginning of prompts is computed once")
        .field("structured_outputs", &Caps::structured_outputs, "QwenBatchSamplingParams.constraint is honoured")
        .field("logit_terms", &Caps::logit_terms, "so are QwenBatchSamplingParams.terms and .priority")
        .field("max_logprobs", &Caps::max_logprobs, "most alternatives that are ranked at a token")
        .field("prompt_logprobs", &Caps::prompt_logprobs, "QwenBatchSamplingParams.prompt_logprobs is honoured")
        .field("speculative_methods", &Caps::speculative_methods, "names of speculative decoding methods");

    using Config = QwenConfig;
    ValueType<Config>(module, "QwenConfig", "What was loaded: facts for people and for planning. Sizes are bytes.", false)
        .field("architecture", &Config::architecture, "the checkpoint's model_type")
        .field("vocab_size", &Config::vocab_size, "token ids are in [0, vocab_size)")
        .field("max_positions", &Config::max_positions, "most tokens that the model was made for")
        .field("max_model_len", &Config::max_model_len, "most tokens of prompt and answer together in this engine")
        .field("max_batch_size", &Config::max_batch_size, "most running requests")
        .field("num_attention_layers", &Config::num_attention_layers, "layers with cached keys and values")
        .field("num_delta_net_layers", &Config::num_delta_net_layers, "layers with a recurrent state")
        .field("dtype", &Config::dtype, "of the weights")
        .field("kv_cache_dtype", &Config::kv_cache_dtype, "of cached keys and values")
        .field("device", &Config::device, "such as \"cpu\"")
        .field("device_description", &Config::device_description, "the processor and what of it is used")
        .field("num_threads", &Config::num_threads, "of the CPU device")
        .field("weight_bytes", &Config::weight_bytes, "of all weights")
        .field("bytes_per_token", &Config::bytes_per_token, "of weights that decoding one token reads")
        .field("kv_cache_bytes", &Config::kv_cache_bytes, "of cached keys and values")
        .field("state_bytes", &Config::state_bytes, "of all recurrent states")
        .field("block_size", &Config::block_size, "tokens of a KV block")
        .field("kv_blocks", &Config::kv_blocks, "number of KV blocks")
        .field("state_snapshots", &Config::state_snapshots, "recurrent states kept for prefix reuse")
        .field("snapshot_interval", &Config::snapshot_interval, "tokens between snapshots of a long prompt")
        .field("eos_token_ids", &Config::eos_token_ids, "ids that end an answer, the main one first")
        .field("eos_source", &Config::eos_source, "the file that names them, or \"none\"")
        .field("limits", &Config::limits, "lines for a log: what is less than the model or the options would allow");
}

}  // namespace pocket::python
