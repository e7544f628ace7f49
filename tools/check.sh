#!/bin/sh
# Install what the tests need, then run them all; the last line is "N passed, N failed".
# Test-only Python peers go into build/venv, and a browser beside the system, while the first builds run (tools/peers.sh);
# where they cannot be had, their tests say what they skip.
set -eu
cd "$(dirname "$0")/.."
sh tools/deps.sh test
mkdir -p build/log
if [ -z "${PY:-}" ]; then
    PY=python3
    if [ -x build/venv/bin/python ] || python3 -m venv build/venv 2>build/log/venv; then
        PY=build/venv/bin/python
        export PEERS=1
    fi
fi
export PY
exec tools/check "$@"
