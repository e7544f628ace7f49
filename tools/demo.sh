#!/bin/sh
# The main job on the model in the repository: serve early weights, measure, replace the weights while
# serving, measure again.
set -eu
cd "$(dirname "$0")/.."
sh tools/deps.sh
make -j"$(nproc)" >build.log 2>&1 || { tail -n 30 build.log; exit 1; }
rm -f build.log
log=$(mktemp)
build/moult serve --model models/tiny-moe-early --port 0 >"$log" 2>&1 &
pid=$!
trap 'kill $pid 2>/dev/null || :; wait $pid 2>/dev/null || :; rm -f "$log"' EXIT INT TERM
i=0
until grep -q '^ready in' "$log"; do
    kill -0 $pid 2>/dev/null || { cat "$log"; exit 1; }
    i=$((i + 1)); [ $i -le 600 ] || { cat "$log"; echo "not ready after 60 s" >&2; exit 1; }
    sleep 0.1
done
cat "$log"
port=$(sed -n 's/^listening on .*:\([0-9]*\)$/\1/p' "$log")
bench() {
    build/moult bench gsm8k --port "$port" --data-path models/gsm-tiny.jsonl --num-shots 8 \
        --num-questions "${QUESTIONS:-1209}" --parallel 1209 --skip-shots --max-new-tokens 256
}
echo "== early weights"
bench
echo "== update, same process"
curl -sS -f "http://127.0.0.1:$port/update_weights_from_disk" -H 'Content-Type: application/json' \
    -d '{"model_path":"models/tiny-moe","weight_version":"final","flush_cache":true,"abort_all_requests":false}'
echo
echo "== final weights"
bench
