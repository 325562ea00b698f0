#!/usr/bin/env bash
# Runs the tests: pytest, then the native engine's own where it was built. Arguments go to pytest, which is then all that runs.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
"$venv/bin/python" -m pytest "$@"
if [ $# -eq 0 ] && [ -f build/native/CMakeCache.txt ]; then
  export PATH=$PATH:$venv/bin  # for a cmake that scripts/build_native.sh put there
  cmake -DPOCKET_BUILD_TESTS=ON build/native >/dev/null
  cmake --build build/native --parallel "$("$venv/bin/python" -c 'import os; print(os.cpu_count() or 1)')" >/dev/null
  ctest --test-dir build/native --output-on-failure
fi
