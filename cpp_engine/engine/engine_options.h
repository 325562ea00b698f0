// How a QwenEngine is made, and what came of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pocket {

struct QwenEngineOptions {
    std::string device = "auto";                            // "cpu", "cuda", "cuda:N", or the best that is linked and there
    std::string dtype = "auto";                             // of the weights: "float32", "bfloat16", "float16", or as stored
    std::string kv_cache_dtype = "auto";                    // "float32", "bfloat16", "float16", or the device's default, beside float32 weights float32
    int max_model_len = 0;                                  // tokens of prompt and answer; 0 is what the model was made for, or what fits
    int max_batch_size = 0;                                 // most running requests; 0 is 8, on a GPU 64, or fewer where their states would leave too little to the KV cache
    std::size_t kv_cache_memory = 0;                        // bytes of keys, values and states; 0 is room for all rows, at most a quarter of free memory, on a GPU 95%
    int num_threads = 0;                                    // of the CPU device; 0 is the cores that the process may use
    int prefill_chunk_tokens = 512;                         // most prompt tokens a step; 0 computes each prompt in one step
    bool enable_prefix_caching = true;
    int tensor_parallel_size = 1;                           // ranks that share the model, each a process of this machine that makes an engine of its own
    int tensor_parallel_rank = 0;                           // this one; rank 0 takes requests, and the others `follow`
    std::string rendezvous_dir;                             // of this run alone, where ranks meet
    std::uint64_t seed = 0;                                 // of requests without a seed of their own, which are repeatable in their order of arrival
};

// Facts by which a caller may branch.
struct EngineCaps {
    int max_slots = 0;                                      // most running requests
    bool continuous_batching = true;
    bool chunked_prefill = true;
    bool paged_kv = true;
    bool per_request_sampling = true;
    bool per_request_top_k = true;
    bool prefix_caching = true;
    bool structured_outputs = true;                         // QwenBatchSamplingParams::constraint is honoured
    bool logit_terms = true;                                // so are QwenBatchSamplingParams::terms and ::priority
    int max_logprobs = 20;                                  // alternatives ranked at a token
    bool prompt_logprobs = true;                            // QwenBatchSamplingParams::prompt_logprobs is honoured
    std::vector<std::string> speculative_methods;
};

// Facts for people, and for those who plan.
struct QwenConfig {
    std::string architecture;                               // model_type of the checkpoint
    int vocab_size = 0;
    int max_positions = 0;                                  // that the model was made for
    int max_model_len = 0;                                  // of this engine
    int max_batch_size = 0;
    int num_attention_layers = 0;
    int num_delta_net_layers = 0;
    std::string dtype;                                      // of the weights
    std::string kv_cache_dtype;
    std::string device;
    std::string device_description;
    int num_threads = 0;
    std::size_t weight_bytes = 0;
    std::size_t bytes_per_token = 0;                        // of weights that decoding one token reads
    std::size_t kv_cache_bytes = 0;
    std::size_t state_bytes = 0;                            // of all state slots
    int block_size = 0;                                     // tokens
    int kv_blocks = 0;
    int state_snapshots = 0;
    int snapshot_interval = 0;                              // tokens
    std::vector<std::int32_t> eos_token_ids;                // the main one first
    std::string eos_source;                                 // the file that names them, or "none"
    std::vector<std::string> limits;                        // lines for the log: what is less than the model or the options would allow
};

}  // namespace pocket
