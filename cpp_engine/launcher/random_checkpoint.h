// Random weights in the shape of a public model, as a checkpoint in a temporary folder: for measures of speed, since its answers are noise.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace pocket::launcher {

std::vector<std::string> shape_names();

// The folder and what is in it are removed with it.
class RandomCheckpoint {
public:
    // Writes bfloat16 weights of the shape `name` below `parent`. Error naming the shape where there is none such, or the file that can't be written.
    RandomCheckpoint(const std::string& name, const std::filesystem::path& parent);
    ~RandomCheckpoint();
    RandomCheckpoint(const RandomCheckpoint&) = delete;
    RandomCheckpoint& operator=(const RandomCheckpoint&) = delete;

    const std::string& path() const noexcept { return path_; }

private:
    std::string path_;
};

}  // namespace pocket::launcher
