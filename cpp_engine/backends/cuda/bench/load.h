// How fast a checkpoint becomes a loaded engine, beside how fast its files can be read; and what that engine answers.
#pragma once

#include <string>

namespace pocket::cuda {

// Reads the folder's safetensors files into pinned memory, by 8 and by 16 threads, then loads the engine and asks it: for a token, a prompt of 8,192
// tokens and 128 more, and a prompt of `context` tokens of which all but the last 512 came in an earlier one. Prints JSON, one object on a line.
void measure_load(const std::string& folder, int context);

}  // namespace pocket::cuda
