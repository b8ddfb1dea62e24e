"""pass@k of a model on a task set.

    python evaluate.py --model runs/laptop/exports/global_step_30 --tasks generated:chains:heldout:64 --k 1,8
    python evaluate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --tasks tasks --samples 8 --k 1,8 \\
        rollout.temperature=0.8 rollout.max_new_tokens=256

Settings come from rl_config.json beside the model, where an export has it, else from the one in this folder, and may
be overridden as in train.py. Leaves out: greedy decoding (temperature 0) and majority votes.
"""

import argparse
import json
import sys
from functools import partial
from math import comb
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from agent import open_sandbox, run_trials, usable_tasks
from checkpoint import DTYPES, eos_ids, load_model
from config import load_config
from quarantine import leave_out
from rollout import Sampler
from tasks import load_tasks

EVAL_STREAM = 1  # second number of the random key: evaluation never draws what training draws


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples passes, c of n having passed.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, found {n}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def summarise(trials, ks) -> dict[str, float | None]:
    """{"pass_at_K": mean over tasks, ...} from the trials of an evaluation.

    A task passes with every test, whatever the reward. A trial that the infrastructure lost is left out of its task's
    n, and a task with fewer than k trials left out of pass@k. None: no task has k trials.
    """
    results: dict[str, list[bool]] = {}
    for trial in trials:
        if trial.outcome != "infra":
            results.setdefault(trial.task, []).append(trial.outcome == "passed")
    means = {}
    for k in ks:
        scores = [pass_at_k(len(passed), sum(passed), k) for passed in results.values() if len(passed) >= k]
        means[f"pass_at_{k}"] = float(np.mean(scores)) if scores else None
    return means


def main():
    parser = argparse.ArgumentParser(description="pass@k of a model on a task set.", epilog=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder in the Hugging Face layout, or a Hub id")
    parser.add_argument("--tasks", required=True, help="task set: directory, parquet file, generated:..., Hub id")
    parser.add_argument("--samples", type=int, default=8, help="trials of each task (default 8)")
    parser.add_argument("--k", default="1", help="comma-separated, e.g. 1,8")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    try:
        result = evaluate(args)
    except ValueError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        sys.exit(2)
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{result['tasks']} tasks x {args.samples} samples of {args.model}:",
              "  ".join(f"{key} {'-' if value is None else format(value, '.3f')}"
                        for key, value in result.items() if key.startswith("pass_at")),
              f"  mean length {result['length_mean']:.1f}  truncated {result['truncated']:.3f}")


def evaluate(args) -> dict:
    try:
        ks = [int(k) for k in args.k.split(",")]
    except ValueError:
        raise ValueError(f"--k: expected whole numbers with commas between them, found {args.k!r}") from None
    for k in ks:
        pass_at_k(args.samples, 0, k)
    beside = Path(args.model) / "rl_config.json"
    file = beside if beside.exists() else Path(__file__).with_name("rl_config.json")
    config = load_config(str(file), [f"model.path={args.model}", *args.overrides])
    say = partial(print, file=sys.stderr)  # stdout is for the result
    tasks = leave_out(load_tasks(args.tasks), config.data.quarantine, say)
    model, tokenizer = load_model(config.model)
    tasks = usable_tasks(tasks, tokenizer, config, say)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sampler = Sampler(model.to(device, DTYPES[config.model.dtype]), eos_ids(model, tokenizer), config.rollout)
    with (open_sandbox(config.sandbox) as sandbox,
          tqdm(total=len(tasks) * args.samples, desc="evaluate", unit="trial", leave=False) as bar):
        trials = run_trials(tasks, args.samples, sampler=sampler, sandbox=sandbox, tokenizer=tokenizer, config=config,
                            seed_of=lambda group, sample: (config.trainer.seed, EVAL_STREAM, 0, group, sample),
                            progress=lambda trial: bar.update())
    lengths = [len(trial.response_ids) for trial in trials]
    return {"tasks": len(tasks), "samples": args.samples, **summarise(trials, ks),
            "length_mean": float(np.mean(lengths)), "truncated": float(np.mean([t.truncated for t in trials]))}


if __name__ == "__main__":
    main()
