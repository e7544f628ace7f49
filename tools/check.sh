#!/bin/sh
# Install what the tests need, then run them all; the last line is "N passed, N failed".
set -eu
cd "$(dirname "$0")/.."
sh tools/deps.sh test
exec tools/check "$@"
