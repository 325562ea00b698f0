#!/bin/sh
# Build the native engine under each sanitizer and run its tests. With arguments, only those tests: names as ctest -R takes them.
#   scripts/native_sanitizers.sh [TEST_PATTERN]
# Builds lie in cpp_engine/build-thread and cpp_engine/build-address and are kept. JOBS is how many compilers run at once (default: the cores).
set -eu
cd "$(dirname "$0")/.."

jobs="${JOBS:-$(nproc 2>/dev/null || echo 2)}"
pattern="${1:-.}"

for sanitizers in thread address,undefined; do
    folder="cpp_engine/build-${sanitizers%%,*}"
    echo "== $sanitizers"
    cmake -S cpp_engine -B "$folder" -DPOCKET_SANITIZE="$sanitizers" -DPOCKET_BUILD_TESTS=ON >/dev/null
    cmake --build "$folder" -j "$jobs"
    # The first report fails its test. Undefined behaviour is printed and goes on unless told otherwise.
    TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1" \
    ASAN_OPTIONS="detect_leaks=1 strict_string_checks=1" \
    UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1" \
        ctest --test-dir "$folder" -R "$pattern" --output-on-failure --no-tests=error -j "$jobs"
done
