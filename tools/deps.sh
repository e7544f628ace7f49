#!/bin/sh
# Install what is missing (Debian, Ubuntu):  sh tools/deps.sh [test | browser]
set -eu
pkgs="make gcc libc6-dev pkg-config libmicrohttpd-dev libjansson-dev libpcre2-dev libutf8proc-dev
      libxxhash-dev nettle-dev libzstd-dev libcurl4-openssl-dev curl"
[ "${1:-}" = test ] && pkgs="$pkgs libcmocka-dev clang clang-format python3 python3-venv libclang-rt-dev"
if [ "${1:-}" = browser ]; then
    grep -q '^ID=debian' /etc/os-release || { echo "skip    no browser: chromium is a Debian package"; exit 0; }
    pkgs=chromium
fi
missing=
for p in $pkgs; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' && continue
    # Another package may already give the same header (libcurl) or the file may not exist here.
    [ "$p" = libcurl4-openssl-dev ] && pkg-config --exists libcurl 2>/dev/null && continue
    missing="$missing $p"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ]; then as=; elif command -v sudo >/dev/null; then as=sudo; else
    echo "please install:$missing" >&2; exit 1
fi
echo "installing:$missing"
$as apt-get update -qq
have=
for p in $missing; do
    if apt-cache show "$p" >/dev/null 2>&1; then have="$have $p"; fi
done
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive $as apt-get install -y -qq --no-install-recommends $have >/dev/null
