// How fast a checkpoint becomes a loaded engine, beside how fast its files can be read.
#pragma once

#include <string>

namespace pocket::cuda {

// Reads the folder's safetensors files into pinned memory twice, then loads the engine and asks it for a token. Prints JSON, one object on a line.
void measure_load(const std::string& folder);

}  // namespace pocket::cuda
