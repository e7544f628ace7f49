#!/bin/sh
# The RL example measured: three seeds in BF16, one each with NVFP4 and MXFP8 rollouts, with routing replay reported.
#   sh bench/rl.sh OUT [python] [flags]      two cores, at most 20 minutes a run; writes OUT/*/log.jsonl and OUT/rl.png
set -eu
out=$1 py=${2:-python3}
shift; [ $# -eq 0 ] || shift
cd "$(dirname "$0")/.."
train() { # name, flags...
    name=$1; shift
    timeout 1200 "$py" examples/rl/train.py --out "$out/$name" --steps 10000 --seconds 1080 "$@" || echo "$name: ended with $?"
}
for seed in 0 1 2; do train "bf16-$seed" --seed $seed "$@"; done
train nvfp4-0 --quantization nvfp4 --as-served --replay report "$@"
train mxfp8-0 --quantization mxfp8 --as-served --replay report "$@"
set --
for d in "$out"/*/; do set -- "$@" "$(basename "$d")=${d}log.jsonl"; done
"$py" examples/rl/plot.py "$out/rl.png" "$@"
tail -n 1 "$out"/*/log.jsonl
