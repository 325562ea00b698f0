#!/usr/bin/env bash
# Runs the tests: pytest, in up to four processes, then the native engine's own where it was built. Arguments go to pytest, which is then all that runs,
# in one process unless they say otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
if [ $# -gt 0 ]; then
  exec "$venv/bin/python" -m pytest "$@"
fi
# Neighbours stay together, for the servers and models that a module or folder shares; who is done takes from the end of another's part.
"$venv/bin/python" -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal
if [ -f build/native/CMakeCache.txt ]; then
  export PATH=$PATH:$venv/bin  # for a cmake that scripts/build_native.sh put there
  cmake -DPOCKET_BUILD_TESTS=ON build/native >/dev/null
  processors=$("$venv/bin/python" -c 'import os; print(os.cpu_count() or 1)')
  cmake --build build/native --parallel "$processors" >/dev/null
  ctest --test-dir build/native --output-on-failure --parallel "$processors"
fi
