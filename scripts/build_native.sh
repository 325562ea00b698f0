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

[ "$(uname -m)" = x86_64 ] || skip "the native kernels are for x86-64 processors"
command -v "${CXX:-c++}" >/dev/null 2>&1 || skip "there is no C++ compiler; with one (Debian and Ubuntu: apt-get install g++) 4-bit models run faster"
mkdir -p build
: >build/native.log
# A step that fails leaves the native parts out, unless they are required.
attempt() { "$@" >>build/native.log 2>&1 || { tail -n 15 build/native.log >&2; skip "'$*' failed; all that it said is in build/native.log"; }; }

cmake=$(command -v cmake || true)
if [ -z "$cmake" ] || [ -z "$(command -v make || command -v ninja || true)" ]; then
  attempt "$venv/bin/python" -m pip --disable-pip-version-check install --quiet cmake ninja
  PATH=$(cd "$venv/bin" && pwd):$PATH  # VENV may be absolute
  export PATH CMAKE_GENERATOR=Ninja
  cmake=$venv/bin/cmake
fi
attempt "$cmake" -S . -B build/native -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$target"
attempt "$cmake" --build build/native
echo "build_native: $target/libpocketllm_native.so"
