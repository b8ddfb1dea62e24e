"""Runs -> one table and one picture.

    python compare.py runs/seqmean runs/tokenmean --out report/

Writes report/report.md (first and last evaluation, mean reward and length of the last ten steps) and
report/curves.png (reward, held-out pass rate, response length, entropy). train.py draws the same of its own run.
Leaves out: pooling of seeds and intervals.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

PANELS = (("reward/mean", "reward, all trials"), ("eval/pass_at_1", "held-out pass@1"),
          ("rollout/length_mean", "response length (tokens)"), ("rollout/entropy", "entropy (nats)"))


def read_metrics(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl in the order of the steps. ValueError: no run there."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{path}: no such file, is {run_dir} the folder of a run?")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def series(metrics, name) -> tuple[list[int], list[float]]:
    found = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def plot(run_dirs, path: Path) -> Path:
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    for run_dir in run_dirs:
        metrics = read_metrics(run_dir)
        for axis, (name, title) in zip(axes.flat, PANELS, strict=True):
            axis.plot(*series(metrics, name), marker=".", linewidth=1.2, label=run_dir.name)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
    for axis, (name, _) in zip(axes.flat, PANELS, strict=True):
        axis.set_ylim(*((0, 1) if name in ("reward/mean", "eval/pass_at_1") else (0, None)))
    axes.flat[0].legend(fontsize=8)
    temporary = path.with_name(f".writing_{path.name}")
    figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)
    temporary.replace(path)
    return path


def table(run_dirs) -> str:
    """Markdown: one row a run."""
    lines = ["| run | steps | held-out pass@1 first | last | reward, last 10 steps | length, last 10 steps |",
             "|---|---|---|---|---|---|"]
    for run_dir in run_dirs:
        metrics = read_metrics(run_dir)
        _, held_out = series(metrics, "eval/pass_at_1")
        cells = [f"{held_out[0]:.3f}", f"{held_out[-1]:.3f}"] if held_out else ["", ""]
        for name, digits in (("reward/mean", 3), ("rollout/length_mean", 1)):
            _, values = series(metrics, name)
            cells.append(f"{np.mean(values[-10:]):.{digits}f}" if values else "")
        lines.append(f"| {run_dir.name} | {metrics[-1]['step']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description="Table and curves of one or more runs.", epilog=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    try:
        text = table(args.runs)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.md").write_text(text, encoding="utf-8")
        print(text + f"\ncurves in {plot(args.runs, args.out / 'curves.png')}")
    except (ValueError, OSError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
