#!/usr/bin/env bash
# Build the native engine's CUDA device on a machine with a GPU, test it, and measure it. From the repository's root:
#
#   scripts/cuda_check.sh [part ...]      parts: build, test, module, sanitize, bench-9b, bench-9b-fp8, bench-0.8b, bench-27b, bench-27b-fp8, prefill-9b, prefill-27b
#
# Without parts: build, test, sanitize, bench-9b. Each part has its own time limit and prints its last lines; whole logs are in $OUT, or in the build folder.
# "module" builds pocketllm_cpp and runs its tests on the GPU, which need pybind11, torch with CUDA, transformers and pytest.
# CUDA_ARCHITECTURE (90a-real), BUILD (build/cuda-check) and PYTHON (python3) may be set.
set -uo pipefail

build=${BUILD:-build/cuda-check}
logs=${OUT:-$build/logs}
architecture=${CUDA_ARCHITECTURE:-90a-real}
python=${PYTHON:-python3}
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(build test sanitize bench-9b)
mkdir -p "$build" "$logs"
failed=0

# part NAME SECONDS CHARACTERS COMMAND...: run it, show the end of what it printed.
part() {
  local name=$1 limit=$2 characters=$3 begin=$SECONDS
  shift 3
  timeout --kill-after=5 "$limit" "$@" >"$logs/$name.log" 2>&1
  local code=$?
  echo "== $name: exit $code after $((SECONDS - begin)) s"
  [ $code -eq 0 ] || failed=1
  tail -c "$characters" "$logs/$name.log"
  return $code
}

bench() {
  part "bench-$1$2" 150 3500 "$build/pocket_cuda_bench" "$1" ${3:-} ${4:-}
}

for wanted in "${parts[@]}"; do
  case $wanted in
    build)
      part configure 60 300 cmake -S cpp_engine -B "$build" -DPOCKET_BACKEND=cuda -DPOCKET_BUILD_TESTS=ON -DCMAKE_CUDA_ARCHITECTURES="$architecture"
      part build 400 1500 cmake --build "$build" -j "$(nproc)"
      part build-bench 120 600 cmake --build "$build" -j "$(nproc)" --target pocket_cuda_bench
      ;;
    test) part ctest 200 2500 ctest --test-dir "$build" --output-on-failure -R "linear|attention|delta|sample|model_runner|trained_model" ;;
    sanitize)
      # All at once: each keeps one processor busy and the GPU hardly at all. One test asks for memory that is not there, so calls that fail are no errors here.
      pids=()
      for tool in "memcheck --report-api-errors no" racecheck initcheck; do
        for test in linear attention delta_net sample; do
          (
            shown=$(TEST_DEVICE=cuda part "${tool%% *}-$test" "${SANITIZE_SECONDS:-150}" 500 compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 3 "$build/test_$test")
            code=$?
            echo "$shown"
            exit $code
          ) &
          pids+=($!)
        done
      done
      for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
      ;;
    module)
      part module-configure 60 300 cmake -S cpp_engine -B "$build" -DPOCKET_BUILD_PYTHON=ON -DPython_EXECUTABLE="$(command -v "$python")" \
        -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)"
      part module-build 200 800 cmake --build "$build" -j "$(nproc)" --target pocketllm_cpp
      PYTHONPATH=$PWD/$build/python:${PYTHONPATH:-} part module-test 200 2500 "$python" -m pytest -p no:cacheprovider -q tests/gpu/test_native_engine.py
      ;;
    bench-*-fp8) name=${wanted#bench-} && bench "${name%-fp8}" -fp8 --float8 ;;
    bench-*) bench "${wanted#bench-}" "" ;;
    prefill-*-fp8) name=${wanted#prefill-} && bench "${name%-fp8}" -prefill-fp8 --float8 --prefill ;;
    prefill-*) bench "${wanted#prefill-}" -prefill --prefill ;;
    *)
      echo "there is no part \"$wanted\"" >&2
      exit 2
      ;;
  esac
done
exit $failed
