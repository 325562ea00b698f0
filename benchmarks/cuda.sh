#!/bin/sh
# Kernel tests, model tests and benchmarks of the torch plane on a CUDA machine, in one go; results and logs go to DIR.
#
#   benchmarks/cuda.sh DIR [tests] [bench] [serving] [-- arguments of torch_cuda.py]
#
# Without a step it does all three. It needs Python with the project's dependencies, and neither installs nor downloads anything. A step that fails
# does not stop the next one; the exit code says whether any failed. PYTHON, SHAPE [qwen3.5-9b], SCRATCH [memory or disk], ENGINE_ARGS [{}],
# SERVE_ARGS [ENGINE_ARGS], SERVING [more arguments of serving_cuda.py], TESTS [what pytest runs] and JOBS [12 test processes] are read from the environment.
set -u

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
}

[ $# -ge 1 ] || usage
root=$(cd "$(dirname "$0")/.." && pwd) || exit
out=$1
shift
mkdir -p "$out" || exit
out=$(cd "$out" && pwd) || exit
steps=
while [ $# -gt 0 ]; do
    case $1 in
        tests | bench | serving) steps="$steps $1" ;;
        --)
            shift
            break
            ;;
        *) usage ;;
    esac
    shift
done
steps=${steps:-tests bench serving}
python=${PYTHON:-python3}
shape=${SHAPE:-qwen3.5-9b}
scratch=${SCRATCH:+--scratch $SCRATCH}
engine_args=${ENGINE_ARGS:-{\}}
cd "$root" || exit
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TRITON_CACHE_AUTOTUNING=1 # what flash-linear-attention tunes is kept for the processes that follow
failed=

step() {
    name=$1
    shift
    began=$(date +%s)
    "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "== $name: exit code $code after $(($(date +%s) - began)) s"
    [ $code -eq 0 ] || failed="$failed $name"
}

for name in $steps; do
    case $name in
        tests)
            parallel=
            if "$python" -c 'import xdist' 2>/dev/null; then parallel="-n ${JOBS:-12}"; fi
            # shellcheck disable=SC2086  # words
            step tests "$python" -m pytest -q -p no:cacheprovider --timeout 240 $parallel ${TESTS:-tests/kernels/test_triton_*.py tests/gpu}
            grep -E '^(FAILED|ERROR|SKIPPED)|passed|failed|skipped| error' "$out/tests.log" | tail -60
            ;;
        bench)
            # shellcheck disable=SC2086  # words
            step bench "$python" benchmarks/torch_cuda.py --shape "$shape" $scratch --engine-args "$engine_args" --out "$out" "$@"
            sed -n '/^| tokens/,$p' "$out/bench.log"
            grep -q '^| tokens' "$out/bench.log" || tail -30 "$out/bench.log"
            ;;
        serving)
            # shellcheck disable=SC2086  # words
            step serving "$python" benchmarks/serving_cuda.py --shape "$shape" $scratch --engine-args "${SERVE_ARGS:-$engine_args}" --out "$out" ${SERVING:-}
            tail -12 "$out/serving.log"
            ;;
    esac
done
if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
