#include "pocket/communicator.h"

#include <algorithm>

namespace pocket {

std::int64_t Communicator::least(std::int64_t number) {
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(size_));
    exchange(&number, sizeof number, numbers.data());
    return *std::min_element(numbers.begin(), numbers.end());
}

}  // namespace pocket
