"""Speed and memory of each part beside the usual way, in one run, interleaved A B A B; JSON on stdout or to --out.

    python bench.py sampler --model models/smollm2                      # tokens/s beside generate()
    python bench.py sampler --model models/smollm2 --memory --rows 64   # peak memory, each in a process of its own

Figures are medians over the rounds; trust ratios of one run, not times of different days.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent import render
from checkpoint import eos_ids
from config import load_config
from rollout import Request, Sampler
from tasks import load_tasks

HERE = Path(__file__).resolve().parent


def ours(model, prompts, eos, config, samples, seed) -> int:
    """Sample with rollout.Sampler -> tokens sampled, EOS included."""
    asked = [Request(prompt, (seed, group, sample)) for group, prompt in enumerate(prompts)
             for sample in range(samples)]
    return sum(len(completion.ids) for completion in Sampler(model, eos, config).run(asked))


def usual(model, prompts, eos, config, samples, seed) -> int:
    """The same by generate(), batch_slots rows at a time, prompts padded on the left, as TRL calls it."""
    torch.manual_seed(seed)
    together, tokens = max(1, config.batch_slots // samples), 0
    for first in range(0, len(prompts), together):
        batch = prompts[first:first + together]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        with torch.inference_mode():
            found = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, temperature=config.temperature,
                                   top_k=0, top_p=1.0, num_return_sequences=samples, eos_token_id=sorted(eos) or None,
                                   max_new_tokens=config.max_new_tokens, pad_token_id=0)[:, width:]
        for row in found.tolist():
            ends = [position for position, token in enumerate(row) if token in eos]
            tokens += ends[0] + 1 if ends else len(row)
    return tokens


def sampler(args) -> dict:
    config = replace(load_config(str(HERE / "configs" / "smollm2.json")).rollout, temperature=1.0, top_p=1.0, top_k=-1,
                     batch_slots=args.rows, max_new_tokens=args.tokens, max_model_len=args.tokens + 512)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [render(task, tokenizer, False) for task in load_tasks(str(HERE / "tasks"))[:args.prompts]]
    eos = set() if args.full else eos_ids(model, tokenizer)
    ways, runs = {"ours": ours, "usual": usual}, {"ours": [], "usual": []}
    for round_ in range(args.rounds):
        for name in args.only or ways:
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = ways[name](model, prompts, eos, config, args.samples, round_)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            runs[name].append({"tokens": tokens, "wall_s": wall, "cpu_s": cpu})
            print(f"bench.py: round {round_ + 1} {name}: {tokens} tokens, {wall:.1f} s", file=sys.stderr)
    result = {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "threads": torch.get_num_threads()}
    for unit in ("wall_s", "cpu_s"):
        speed = {name: statistics.median(run["tokens"] / run[unit] for run in found)
                 for name, found in runs.items() if found}
        result[f"tokens_per_{unit}"] = speed
        if len(speed) == 2:
            result[f"ratio_{unit}"] = speed["ours"] / speed["usual"]
    return result | {"runs": runs}


def memory(args) -> dict:
    """Peak resident memory of each way in a process of its own, every row as long as allowed."""
    peaks = {}
    for name in ("ours", "usual"):
        command = [sys.executable, __file__, "sampler", "--model", args.model, "--rows", str(args.rows), "--full",
                   "--tokens", str(args.tokens), "--prompts", str(args.rows // args.samples), "--samples",
                   str(args.samples), "--rounds", "1", "--only", name]
        peaks[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["peak_mb"]
    return {"peak_mb": peaks, "ratio": peaks["ours"] / peaks["usual"]}


def main():
    parser = argparse.ArgumentParser(description="Measure a part beside the usual way.", epilog=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    part = parser.add_subparsers(dest="part", required=True).add_parser("sampler")
    part.add_argument("--model", required=True, help="model folder")
    for name, default in (("prompts", 16), ("samples", 8), ("tokens", 256), ("rows", 64), ("rounds", 5)):
        part.add_argument(f"--{name}", type=int, default=default)
    part.add_argument("--full", action="store_true", help="no EOS: every row is as long as allowed")
    part.add_argument("--only", nargs="+", choices=("ours", "usual"))
    part.add_argument("--memory", action="store_true", help="peak memory instead of speed")
    part.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = json.dumps(memory(args) if args.memory else sampler(args), indent=1)
    args.out.write_text(text + "\n") if args.out else print(text)


if __name__ == "__main__":
    main()
