"""Reward, held-out accuracy and mismatch of one or more runs as a PNG.

    python3 examples/rl/plot.py OUT.png NAME=DIR/log.jsonl ...
"""
import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def main():
    out, runs = sys.argv[1], [a.split("=", 1) for a in sys.argv[2:]]
    figure, (reward, accuracy, mean, kl) = plt.subplots(1, 4, figsize=(15, 3.6), constrained_layout=True)
    for i, (name, path) in enumerate(runs):
        with open(path) as f:
            rows = [json.loads(line) for line in f]
        color = f"C{i}"

        def line(axes, key, values, *style, **more):
            points = [(r["step"], values(r)) for r in rows if key in r]
            if points:
                axes.plot(*zip(*points), *style, color=color, **more)
        line(reward, "reward", lambda r: r["reward"], label=name)
        line(accuracy, "accuracy", lambda r: 100 * r["accuracy"], "o-", label=name)
        line(mean, "mismatch", lambda r: r["mismatch"]["mean"], label=name)
        line(kl, "mismatch", lambda r: r["mismatch"]["kl"], label=name)
        line(mean, "mismatch_replay", lambda r: r["mismatch_replay"]["mean"], "--", label=name + ", routing replayed")
        line(kl, "mismatch_replay", lambda r: r["mismatch_replay"]["kl"], "--", label=name + ", routing replayed")
    for axes, title in ((reward, "reward of the rollouts"), (accuracy, "held-out problems right, %, greedy"),
                        (mean, "mean |log-probability difference|"), (kl, "KL(server || trainer), k3")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    mean.set_yscale("log")
    kl.set_yscale("log")
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    main()
