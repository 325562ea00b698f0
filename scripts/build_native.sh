#!/usr/bin/env bash
# Builds the native parts: the torch plane's CPU kernels into the source tree, where an editable install finds them; the native engine's module
# pocketllm_cpp into the virtual environment's packages, and its launcher pocketllm_engine beside the environment's python. Does nothing, and says so,
# where there is no C++ compiler: everything else runs without them.
# NATIVE_REQUIRED  1: fail where they can't be built
# POCKET_BACKEND   cpu, or cuda, which adds NVIDIA GPUs and needs nvcc and cuBLASLt: cpp_engine/backends/cuda/backend.cmake [cpu]
# CUDAARCHS        GPUs to compile for, such as 86-real, or 90a-real for Hopper [all from Turing to Hopper]
# VENV             virtual environment that gets them, and pybind11; cmake too when the machine has none [.venv]
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$(cd "${VENV:-.venv}" && pwd)
target=pocketllm/torch_engine/kernels

skip() {
  echo "build_native: skipped, $1" >&2
  exit "${NATIVE_REQUIRED:-0}"
}

command -v "${CXX:-c++}" >/dev/null 2>&1 ||
  skip "there is no C++ compiler; with one (Debian and Ubuntu: apt-get install g++) there is the native engine, and 4-bit models run faster on the torch plane"
mkdir -p build
: >build/native.log
# A step that fails leaves the native parts out, unless they are required.
attempt() { "$@" >>build/native.log 2>&1 || { tail -n 15 build/native.log >&2; skip "'$*' failed; all that it said is in build/native.log"; }; }

cmake=$(command -v cmake || true)
if [ -z "$cmake" ] || [ -z "$(command -v make || command -v ninja || true)" ]; then
  attempt "$venv/bin/python" -m pip --disable-pip-version-check install --quiet cmake ninja
  PATH=$venv/bin:$PATH
  export PATH CMAKE_GENERATOR=Ninja
  cmake=$venv/bin/cmake
fi
"$venv/bin/python" -c 'import pybind11' 2>/dev/null || attempt "$venv/bin/python" -m pip --disable-pip-version-check install --quiet 'pybind11>=2.13'
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
pybind11=$("$venv/bin/python" -m pybind11 --cmakedir)
echo "build_native: compiling the native parts (a few minutes; what the compiler says is in build/native.log)"
attempt "$cmake" -S . -B build/native -DPOCKET_BACKEND="${POCKET_BACKEND:-cpu}" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$target" -DPython_EXECUTABLE="$venv/bin/python" -Dpybind11_DIR="$pybind11"
attempt "$cmake" --build build/native --parallel "$("$venv/bin/python" -c 'import os; print(os.cpu_count() or 1)')"
attempt "$cmake" --install build/native --component python --prefix "$packages"
attempt "$cmake" --install build/native --component launcher --prefix "$venv"
if [ -f "$target/libpocketllm_native.so" ]; then
  echo "build_native: $target/libpocketllm_native.so"
fi
echo "build_native: pocketllm_cpp in $packages, $venv/bin/pocketllm_engine"
