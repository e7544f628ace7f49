#!/bin/sh
# The RL example measured: three seeds in BF16, one each with NVFP4 and MXFP8 rollouts, with routing replay reported.
#   sh bench/rl.sh OUT [python]       two cores, at most 20 minutes a run; writes OUT/*/log.jsonl and OUT/rl.png
set -eu
out=$1 py=${2:-python3}
cd "$(dirname "$0")/.."
train() { # name, flags...
    name=$1; shift
    timeout 1200 "$py" examples/rl/train.py --out "$out/$name" --steps 1000 --target 0.62 "$@" || echo "$name: ended with $?"
}
for seed in 0 1 2; do train "bf16-$seed" --seed $seed --replay report; done
train nvfp4-0 --quantization nvfp4 --replay report
train mxfp8-0 --quantization mxfp8 --replay report
set --
for d in "$out"/*/; do set -- "$@" "$(basename "$d")=${d}log.jsonl"; done
"$py" examples/rl/plot.py "$out/rl.png" "$@"
tail -n 1 "$out"/*/log.jsonl
