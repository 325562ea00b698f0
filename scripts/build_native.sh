#!/usr/bin/env bash
# Builds the native parts into the source tree, where an editable install finds them. Does nothing, and says so, where there
# is no C++ compiler or no x86-64 processor: everything runs without them, decoding more slowly.
# NATIVE_REQUIRED  1: fail where they can't be built
# VENV             virtual environment that takes cmake when the machine has none [.venv]
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
target=pocketllm/torch_engine/kernels

skip() {
  echo "build_native: skipped, $1" >&2
  exit "${NATIVE_REQUIRED:-0}"
}

[ "$(uname -m)" = x86_64 ] || skip "the native decode step is for x86-64 processors"
command -v "${CXX:-c++}" >/dev/null 2>&1 || skip "there is no C++ compiler; with one (Debian and Ubuntu: apt-get install g++) decoding is about twice as fast"
cmake=$(command -v cmake || true)
if [ -z "$cmake" ] || [ -z "$(command -v make || command -v ninja || true)" ]; then
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet cmake ninja || skip "cmake is not there and could not be installed"
  cmake="$venv/bin/cmake"
  export PATH="$PWD/$venv/bin:$PATH" CMAKE_GENERATOR=Ninja
fi
build() { "$cmake" -S . -B build/native -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$target" && "$cmake" --build build/native; }
log=$(build 2>&1) || {
  tail -n 20 <<<"$log" >&2
  skip "the build failed (above); GCC 11 or Clang 14 and newer can build it"
}
echo "build_native: $target/libpocketllm_decode_step.so"
