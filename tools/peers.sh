#!/bin/sh
# Programs and packages that are not ours and that tests compare with:  sh tools/peers.sh PYTHON
# What cannot be had is named, and is no failure.
cd "$(dirname "$0")/.." || exit 2
for list in "-r test/requirements.txt" "--no-deps -r test/requirements-alone.txt"; do
    # shellcheck disable=SC2086
    "$1" -m pip install -q --no-compile --disable-pip-version-check $list && continue
    # One that is missing must not take the others with it.
    sed 's/#.*//; /^ *$/d' "${list##* }" | while read -r package; do
        # shellcheck disable=SC2086
        "$1" -m pip install -q --no-compile --disable-pip-version-check ${list%-r*} "$package" >/dev/null 2>&1 ||
            echo "skip    $package cannot be installed"
    done
done
sh tools/deps.sh browser || echo "skip    no browser can be installed"
