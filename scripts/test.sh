#!/usr/bin/env bash
# Runs the tests: pytest, then ctest where a native build exists. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

"${VENV:-.venv}/bin/python" -m pytest "$@"
if [ -f build/cpp/CTestTestfile.cmake ]; then
  ctest --test-dir build/cpp --output-on-failure
fi
