#!/usr/bin/env bash
# Compiles the native engine's CUDA kernels to machine code of the GPUs that they are for, several files at a time. Runs nothing, and needs nvcc alone: no GPU, no cuBLASLt.
#   scripts/cuda_compile.sh [ARCHITECTURE ...]      [75 80 86 89 90a: from Turing to Hopper]
# Where there is no nvcc it says so and does nothing. What was compiled before is not compiled again.
# BUILD  where that is remembered [build/cuda-compile]
set -euo pipefail
cd "$(dirname "$0")/.."

nvcc=${CUDACXX:-$(command -v nvcc || true)}
if [ -z "$nvcc" ] && [ -x /usr/local/cuda/bin/nvcc ]; then
  nvcc=/usr/local/cuda/bin/nvcc
fi
if [ -z "$nvcc" ]; then
  echo "cuda_compile: skipped, there is no nvcc: install the CUDA toolkit, or set CUDACXX to it"
  exit 0
fi

architectures=("$@")
[ $# -gt 0 ] || architectures=(75 80 86 89 90a)
options=(-std=c++20 --expt-relaxed-constexpr -O3 -Icpp_engine/include -Icpp_engine --fatbin)
for architecture in "${architectures[@]}"; do
  options+=(-gencode "arch=compute_$architecture,code=sm_$architecture")
done
folder=cpp_engine/backends/cuda
build=${BUILD:-build/cuda-compile}
mkdir -p "$build"

# Everything that a file's machine code depends on beside the file itself.
common=$("$nvcc" --version; echo "${options[*]}"; cat "$folder"/*.cuh "$folder"/*.h cpp_engine/include/pocket/*.h cpp_engine/core/*.h)
compile() {
  local file=$1 name stamp
  name=$(basename "$file")
  stamp=$build/$name.$( (echo "$common"; cat "$file") | sha256sum | cut -c1-16)
  [ ! -f "$stamp" ] || return 0
  if ! "$nvcc" "${options[@]}" -o "$build/$name.fatbin" "$file" >"$build/$name.log" 2>&1 || grep -q "warning" "$build/$name.log"; then
    echo "cuda_compile: $file does not compile without errors and warnings:" >&2
    cat "$build/$name.log" >&2
    return 1
  fi
  rm -f "$build/$name.fatbin" "$build/$name.log"
  touch "$stamp"
}

echo "cuda_compile: nvcc $("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p'), for sm_${architectures[*]}"
compilers=()
for file in "$folder"/*.cu; do
  while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n || true; done
  compile "$file" &
  compilers+=($!)
done
status=0
for compiler in "${compilers[@]}"; do wait "$compiler" || status=1; done
exit $status
