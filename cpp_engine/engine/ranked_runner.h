// One model over several ranks: rank 0's runner tells every step to the others, which compute it with it.
#pragma once

#include <span>
#include <vector>

#include "engine/runner.h"
#include "pocket/communicator.h"

namespace pocket {

// Rank 0's. What fails here ends the others. Runner and ranks must outlive it.
class LeadingRunner final : public Runner {
public:
    LeadingRunner(Runner& inner, Communicator& ranks) : inner_(inner), ranks_(ranks) {}

    int vocab_size() const noexcept override { return inner_.vocab_size(); }
    const CacheShape& cache() const noexcept override { return inner_.cache(); }
    std::vector<Draw> run(std::span<const RunRow> rows, std::span<const StateCopy> copies) override;
    std::vector<float> logits(const RunRow& row, std::span<const StateCopy> copies) override;

    // Tell the others that there are no more steps. Error(unavailable) where one is lost.
    void dismiss();

private:
    Runner& inner_;
    Communicator& ranks_;
};

// Another rank's loop: compute what rank 0 orders until it dismisses this one. Error(unavailable) where a rank is lost; what fails here ends the others.
void follow(Runner& inner, Communicator& ranks);

}  // namespace pocket
