// What a request changes in the logits before its tokens are drawn. pocketllm/backends/logit_terms.py has the formulas and their order.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace pocket {

struct LogitTerms {
    float repetition_penalty = 1;                           // above 0; divides logits above 0 of ids of prompt and answer, multiplies others; 1 is off
    float frequency_penalty = 0;                            // taken from an id's logit for each time that it is in the answer
    float presence_penalty = 0;                             // taken from the logit of each id of the answer
    std::vector<std::pair<std::int32_t, float>> logit_bias; // added; each id once
    float min_p = 0;                                        // least probability that is drawn, as a part of the likeliest id's, 0 to 1; 0 is off
    int min_tokens = 0;                                     // no id that ends the row is drawn before it has so many
    std::optional<std::vector<std::int32_t>> allowed_token_ids;  // no others are drawn; at least one
    std::vector<std::vector<std::int32_t>> bad_words;       // the last id of each is not drawn after its others
};

}  // namespace pocket
