// Which logits of a row its terms change: one entry for each id, brought up to date with the ids that the row has had since its last draw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/logit_terms.h"
#include "pocket/device.h"

namespace pocket {

// Nothing here hangs on slots, blocks or the cache: all follows from a row's ids, so a row that is preempted or starts from a cached prefix goes on as it was.
class LogitEdits {
public:
    // `ends`: ids that end the row.
    LogitEdits(const LogitTerms& terms, std::span<const std::int32_t> prompt, std::span<const std::int32_t> ends);

    // What changes at the next draw of a row that has drawn `answer`. Draws are asked for in their order; one may be asked for again. The entries stay as they
    // are until the next call.
    std::span<const LogitEdit> step(std::span<const std::int32_t> answer);

    // Bit i % 32 of word i / 32 is set where id i is one of allowed_token_ids; empty where all are allowed.
    std::span<const std::uint32_t> allowed(int vocab_size);

private:
    struct Seen {
        int count = 0;                                      // times in the answer
        bool is_in_prompt = false;
        bool is_banned = false;                             // always, or until the row may end
        float bias = 0;
    };

    std::size_t place_of(std::int32_t id);                  // of its entry, which is made where there is none
    void update(std::size_t place);
    void ban(std::size_t place);                            // for this step

    const LogitTerms& terms_;
    bool counts_answer_;
    std::size_t num_counted_ = 0;
    std::vector<LogitEdit> entries_;
    std::vector<Seen> seen_;                                // of each entry
    std::unordered_map<std::int32_t, std::size_t> places_;
    std::vector<std::size_t> ends_;                         // places, until the row may end
    std::unordered_map<std::int32_t, std::vector<const std::vector<std::int32_t>*>> words_;  // of two ids and more, by their last but one
    std::vector<std::size_t> banned_now_;                   // places that the last step banned
    std::vector<std::uint32_t> allowed_;
};

}  // namespace pocket
