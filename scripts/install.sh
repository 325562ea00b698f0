#!/usr/bin/env bash
# Installs PocketLLM, editable, into a virtual environment.
#   scripts/install.sh [EXTRAS]      for example: scripts/install.sh dev
# PYTHON         interpreter to make the environment with [the first python3 that is 3.11 or newer]
# VENV           where the environment lives [.venv]
# TORCH_VERSION  version of torch [2.13.0]
# POCKETLLM_BUILD_CPP  1: build the native parts or fail; 0: leave them out [built where there is a compiler]
# POCKET_BACKEND  cuda: build the native engine for NVIDIA GPUs too, or fail [cpu]
set -euo pipefail
cd "$(dirname "$0")/.."

extras=${1:-}
venv=${VENV:-.venv}
torch_version=${TORCH_VERSION:-2.13.0}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

fail() {
  echo "install: $1" >&2
  exit 1
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of version 3.11 or newer: name one that is."
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.14; do
    if is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer found: install one, or name it with PYTHON=/path/to/python3."
}

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  echo "install: making $venv with $("$python" --version)"
  "$python" -m venv "$venv" || fail "$python cannot make a virtual environment: install its venv module (Debian and Ubuntu: apt-get install python3-venv)."
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check)

# torch comes first and pinned, so that no dependency chooses another build of it.
echo "install: torch $torch_version (the largest download; a few minutes the first time)"
"${pip[@]}" install --quiet "torch==$torch_version"
echo "install: pocketllm${extras:+ with the extras $extras}"
POCKETLLM_BUILD_CPP=0 "${pip[@]}" install --quiet --editable ".${extras:+[$extras]}" "torch==$torch_version"

# The native parts: 1 asks for them, 0 leaves them out, otherwise they are built where there is a compiler.
case "${POCKETLLM_BUILD_CPP:-auto}-${POCKET_BACKEND:-cpu}" in
  0-*) ;;
  1-* | auto-cuda) NATIVE_REQUIRED=1 VENV=$venv scripts/build_native.sh ;;
  *) VENV=$venv scripts/build_native.sh ;;
esac
