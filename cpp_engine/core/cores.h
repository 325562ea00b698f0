// How many processor cores this process may use.
#pragma once

namespace pocket {

// The smaller of the cores in the affinity mask and of the CPU quota of the control group (version 1 or 2), at least 1.
int available_cores();

}  // namespace pocket
