// llama.cpp's greedy ids, for record_greedy.py. Built beside the libraries of scripts/build_llama_cpp.sh, as that file says.
//
// Usage: llama_cpp_greedy MODEL COUNT < prompts, each ended by a zero byte.
// Writes a line of JSON a prompt: its ids, the COUNT ids after it, and each one's lead over the second best, in logits.

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "llama.h"

static void print_ids(const char* name, const std::vector<llama_token>& ids) {
  std::printf("\"%s\": [", name);
  for (size_t i = 0; i < ids.size(); i++) std::printf("%s%d", i ? ", " : "", ids[i]);
  std::printf("], ");
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s MODEL COUNT < prompts\n", argv[0]);
    return 2;
  }
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (!model) return 1;
  const llama_vocab* vocab = llama_model_get_vocab(model);
  const int vocab_size = llama_vocab_n_tokens(vocab);
  const int count = std::atoi(argv[2]);
  std::string prompt;
  while (std::getline(std::cin, prompt, '\0')) {
    std::vector<llama_token> ids(prompt.size() + 16);
    ids.resize(llama_tokenize(vocab, prompt.data(), prompt.size(), ids.data(), ids.size(), true, true));
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = ids.size() + count;
    params.n_threads = params.n_threads_batch = 1;
    llama_context* context = count ? llama_init_from_model(model, params) : nullptr;
    if (count && !context) return 1;
    std::vector<llama_token> next = ids, answer;
    std::vector<float> leads;
    while (static_cast<int>(answer.size()) < count) {
      if (llama_decode(context, llama_batch_get_one(next.data(), next.size()))) return 1;
      const float* logits = llama_get_logits_ith(context, -1);
      int best = logits[1] > logits[0], second = 1 - best;
      for (int id = 2; id < vocab_size; id++) {
        if (logits[id] > logits[best]) {
          second = best;
          best = id;
        } else if (logits[id] > logits[second]) {
          second = id;
        }
      }
      leads.push_back(logits[best] - logits[second]);
      answer.push_back(best);
      next = {best};
    }
    if (context) llama_free(context);
    std::printf("{");
    print_ids("prompt_ids", ids);
    print_ids("ids", answer);
    std::printf("\"leads\": [");
    for (size_t i = 0; i < leads.size(); i++) std::printf("%s%.3f", i ? ", " : "", leads[i]);
    std::printf("]}\n");
  }
  llama_model_free(model);
  llama_backend_free();
}
