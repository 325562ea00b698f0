#!/usr/bin/env bash
# Checks style, format and types. Runs all three, so that one call shows everything there is to mend.
set -uo pipefail
cd "$(dirname "$0")/.."

bin=${VENV:-.venv}/bin
status=0
"$bin/ruff" check . || status=1
"$bin/ruff" format --check . || status=1
"$bin/mypy" || status=1
exit $status
