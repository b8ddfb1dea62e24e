"""Each part beside the usual way, in one process, A B A B: seconds of wall and CPU, extra memory; medians as JSON.

    python bench.py sampler --model models/smollm2
    python bench.py sampler --model models/smollm2 --full --tokens 1024 --prompts 8 --repeats 1   # memory
    python bench.py kernel --tokens 4096 --hidden 1024 --vocabulary 151936
    python bench.py update --prompt-tokens 512 --out update.json
    python bench.py update --peer 'PYTHON PEER.py --threads 1 ...'
    python bench.py sandbox --workers 1 2

The usual way of `sampler` is generate() with prompts padded on the left; of `kernel` the graph of log_softmax over all
logits; of `update` and `step` a right-padded batch of 16 whole rows through the same graph, for every row; of `sandbox`
`python -m pytest` without any isolation, on the same files. `--peer` runs another trainer in its own environment
between our turns: a command whose last line is a JSON object with `median_s`: {"train_cpu": seconds, "cpu": seconds},
the update and the whole step. Compare ratios of one run; absolute times hold for one machine on one day.

Extra memory is the peak of the resident set during the call above what it was before (Linux, 10^9 bytes).
"""

import argparse
import ctypes
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agent import Trial, render
from checkpoint import eos_ids
from config import load_config
from loss import fused_policy_loss, policy_loss
from rollout import Request, Sampler
from sandbox import Sandbox
from tasks import load_tasks
from update import Policy, distribute, update

HERE = Path(__file__).resolve().parent
CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
USUAL_ROWS = 16  # rows of a micro-batch of the usual way
ADD = b"def add(a, b):\n    return a + b\n"
FIVE = "from solution import add\n" + "".join(f"def test_{n}(): assert add({n}, 1) == {n + 1}\n" for n in range(5))
FIXTURE = "import pytest\n@pytest.fixture(autouse=True)\ndef ready():\n    yield\n"  # left to pytest by ours


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--repeats", type=int, default=5, help="turns of each, after a warm-up")
    common.add_argument("--threads", type=int, help="default: as many as torch takes")
    common.add_argument("--out", help="write the JSON here too")
    parts = parser.add_subparsers(required=True, metavar="PART")

    part = parts.add_parser("sampler", parents=[common], help="rollout.Sampler beside generate(): tokens a second")
    part.set_defaults(run=sampler)
    part.add_argument("--model", required=True, help="model folder")
    for name, default in (("prompts", 16), ("samples", 8), ("tokens", 256), ("rows", 64)):
        part.add_argument(f"--{name}", type=int, default=default)
    part.add_argument("--full", action="store_true", help="no EOS: every row is as long as allowed")

    part = parts.add_parser("kernel", parents=[common], help="loss.fused_policy_loss, forward and backward")
    part.set_defaults(run=kernel)
    for name, default in (("tokens", 4096), ("hidden", 1024), ("vocabulary", 151936), ("chunk", 512)):
        part.add_argument(f"--{name}", type=int, default=default)
    part.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    part.add_argument("--alone", action="store_true", help="without the usual way, whose graph may not fit")

    shapes = argparse.ArgumentParser(add_help=False)
    shapes.add_argument("--model", help="folder of a model; default: a random Qwen3 of 5.25 M parameters")
    for name, default in (("prompts", 8), ("group-size", 8), ("prompt-tokens", 128), ("new-tokens", 128),
                          ("micro-batch-tokens", 8192)):
        shapes.add_argument(f"--{name}", type=int, default=default)
    shapes.add_argument("--flat", type=float, default=0.0, help="share of the groups whose rewards are all the same")
    shapes.add_argument("--peer", metavar="COMMAND")
    part = parts.add_parser("update", parents=[common, shapes], help="update.update, all responses of --new-tokens")
    part.set_defaults(run=whole_update)
    part = parts.add_parser("step", parents=[common, shapes], help="sampling up to --new-tokens, then the update")
    part.set_defaults(run=whole_step)

    part = parts.add_parser("sandbox", parents=[common], help="Sandbox.grade of five trivial tests: runs a second")
    part.set_defaults(run=grading)
    part.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="runs at once, each number in turn")
    part.add_argument("--runs", type=int, default=20, help="of each way in one turn")

    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found = {"settings": {key: value for key, value in vars(args).items() if key != "run"}, "torch": torch.__version__,
             "cpu_bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(), **args.run(args)}
    text = json.dumps(found, indent=2)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")


def sample_ours(model, prompts, eos, config, samples) -> int:
    """Sample with rollout.Sampler -> tokens sampled, EOS included."""
    asked = [Request(prompt, (0, group, sample)) for group, prompt in enumerate(prompts)
             for sample in range(samples)]
    return sum(len(completion.ids) for completion in Sampler(model, eos, config).run(asked))


def sample_usual(model, prompts, eos, config, samples) -> int:
    """The same by generate(), batch_slots rows at a time, prompts padded on the left, as TRL calls it."""
    torch.manual_seed(0)
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
    arguments = model, prompts, set() if args.full else eos_ids(model, tokenizer), config, args.samples
    return alternate({"ours": timed(partial(sample_ours, *arguments)),
                      "usual": timed(partial(sample_usual, *arguments))}, args.repeats)


def kernel(args) -> dict:
    dtype = torch.float32 if args.dtype == "float32" else torch.bfloat16
    hidden = torch.randn(args.tokens, args.hidden).to(dtype).requires_grad_()
    head = (torch.randn(args.vocabulary, args.hidden) * 0.02).to(dtype).requires_grad_()
    targets, advantages = torch.randint(0, args.vocabulary, (args.tokens,)), torch.randn(args.tokens)
    weights = torch.full((args.tokens,), 1 / args.tokens)

    def ours():
        fused_policy_loss(hidden, head, targets, weights, advantages, chunk=args.chunk, **CLIP)[0].backward()
        hidden.grad = head.grad = None

    def usual():
        plain_loss(hidden @ head.T, targets, weights, advantages).backward()
        hidden.grad = head.grad = None

    return alternate({"ours": timed(ours)} | ({} if args.alone else {"usual": timed(usual)}), args.repeats)


def plain_loss(logits, targets, weights, advantages) -> torch.Tensor:
    """The same loss from logits (..., V) of every token, with all the tensors that autograd keeps for it."""
    logprobs = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return (weights * policy_loss(logprobs, logprobs.detach(), advantages, **CLIP)).sum()


def whole_update(args) -> dict:
    setting = trainer(args)
    trials = forced_trials(setting, args)
    return compared(args, lambda: setting.update(trials), lambda: usual_update(setting, trials), "train_cpu")


def whole_step(args) -> dict:
    setting = trainer(args)
    trials = forced_trials(setting, args)
    sampler = Sampler(setting.model, {setting.model.config.eos_token_id}, setting.config.rollout)

    def ours():
        requests = [Request(trial.prompt_ids, trial.seed) for trial in trials]
        for trial, completion in zip(trials, sampler.run(requests)):
            trial.response_ids, trial.logprobs = completion.ids, completion.logprobs
            trial.loss_mask = [1] * len(completion.ids)
        setting.update(trials)

    def usual():
        for start in range(0, len(trials), USUAL_ROWS):
            rows = trials[start:start + USUAL_ROWS]
            ids = torch.tensor([row.prompt_ids for row in rows])
            setting.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
                                   max_new_tokens=args.new_tokens, pad_token_id=0)
        usual_update(setting, trials)

    return compared(args, ours, usual, "cpu")


def trainer(args) -> SimpleNamespace:
    """Model, optimizer, config and update(trials), as train.py sets them up."""
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, head_dim=32, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0))
    config = load_config(str(HERE / "configs" / "laptop.json"), [
        f"trainer.train_batch_size={args.prompts}", f"trainer.policy_mini_batch_size={args.prompts}",
        f"trainer.micro_batch_tokens={args.micro_batch_tokens}", f"rollout.max_new_tokens={args.new_tokens}",
        f"rollout.max_model_len={args.prompt_tokens + args.new_tokens}", "optimizer.lr=1e-6",
        f"rollout.batch_slots={args.prompts * args.group_size}"])
    accelerator = Accelerator(cpu=True)
    policy = distribute(Policy(model), accelerator, 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)

    def one_update(trials):
        update(policy, None, optimizer, accelerator, trials, 1, config)

    return SimpleNamespace(model=model, optimizer=optimizer, config=config, vocabulary=model.config.vocab_size,
                           update=one_update)


def forced_trials(setting, args) -> list[Trial]:
    random, trials = np.random.default_rng(0), []
    for group in range(args.prompts):
        prompt = random.integers(2, setting.vocabulary, args.prompt_tokens).tolist()
        for sample in range(args.group_size):
            advantage = 0.0 if group < args.flat * args.prompts else float(random.normal())
            trials.append(Trial(
                task=f"t{group}", group=group, sample=sample, seed=(0, group, sample), messages=[], prompt_ids=prompt,
                response_ids=random.integers(2, setting.vocabulary, args.new_tokens).tolist(),
                loss_mask=[1] * args.new_tokens, logprobs=[-1.0] * args.new_tokens, reward=0.0, outcome="failed",
                ending="", excluded=False, truncated=False, advantage=advantage))
    return trials


def usual_update(setting, trials):
    """Every row whole, its trained tokens' logits kept for autograd."""
    tokens = sum(len(trial.response_ids) for trial in trials)
    setting.model.train()
    setting.optimizer.zero_grad()
    for start in range(0, len(trials), USUAL_ROWS):
        rows = trials[start:start + USUAL_ROWS]
        longest = max(len(row.response_ids) for row in rows)
        ids = torch.tensor([row.prompt_ids + row.response_ids + [0] * (longest - len(row.response_ids))
                            for row in rows])
        mask = torch.tensor([[1] * (len(row.prompt_ids) + len(row.response_ids))
                             + [0] * (longest - len(row.response_ids)) for row in rows])
        logits = setting.model(input_ids=ids, attention_mask=mask, logits_to_keep=longest + 1, use_cache=False).logits
        advantages = torch.tensor([[row.advantage] for row in rows])
        plain_loss(logits[:, :-1], ids[:, -longest:], mask[:, -longest:] / tokens, advantages).backward()
    torch.nn.utils.clip_grad_norm_(setting.model.parameters(), 1.0)
    setting.optimizer.step()


def compared(args, ours, usual, figure) -> dict:
    """Turns of ours, the usual way and the peer; the peer's one turn gives the median of its own warm steps."""
    turns = {"ours": timed(ours), "usual": timed(usual)}
    if args.peer:
        def peer():
            done = subprocess.run(shlex.split(args.peer), capture_output=True, text=True, env={
                **os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())})
            if done.returncode:
                sys.exit(f"bench.py: --peer ended with {done.returncode}: {done.stderr.strip()[-500:]}")
            return {"cpu_s": json.loads(done.stdout.strip().splitlines()[-1])["median_s"][figure]}
        turns["peer"] = peer
    return alternate(turns, args.repeats)


def grading(args) -> dict:
    """Runs a second by the fast runner and by pytest in the sandbox, and of `python -m pytest` on the same files."""
    tasks = {name: SimpleNamespace(id=name, files={"tests/test_add.py": tests.encode(), "solution/solution.py": ADD})
             for name, tests in (("own", FIVE), ("pytest", FIXTURE + FIVE))}
    found = {}
    with tempfile.TemporaryDirectory() as folder, Sandbox(max(args.workers), timeout_s=60) as box:
        for name, task in tasks.items():
            Path(folder, name).mkdir()
            for path, data in task.files.items():
                Path(folder, name, Path(path).name).write_bytes(data)

        def ours(name):
            verdict = box.grade(tasks[name], {"solution.py": ADD})
            if verdict.passed != 5 or box.plans[name].runner != name:
                sys.exit(f"bench.py: sandbox: {verdict.outcome} by {box.plans[name].runner}: {verdict.output}")

        def usual(name):
            subprocess.run([sys.executable, "-m", "pytest"], cwd=Path(folder, name), check=True, capture_output=True)

        for workers in args.workers:
            with ThreadPoolExecutor(workers) as pool:
                for name in tasks:
                    def batch(way, names=(name,) * args.runs, pool=pool):
                        return timed(lambda: len(list(pool.map(way, names))))

                    turns = {"ours": batch(ours), "usual": batch(usual)}
                    found[f"{workers} at once, {name}"] = alternate(turns, args.repeats)
        return {"isolation": box.level, **found}


def timed(function):
    """-> a turn: seconds, extra memory and, if `function` returns how many it made (tokens, runs), those a second."""
    def turn():
        ctypes.CDLL(None).malloc_trim(0)  # or what the last call freed would serve this one unseen
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
        wall, cpu = time.perf_counter(), time.process_time()
        made = function()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        found = {"wall_s": wall, "cpu_s": cpu, "extra_gb": resident("VmHWM") - before}
        return found if made is None else found | {"made": made, "per_wall_s": made / wall, "per_cpu_s": made / cpu}

    return turn


def alternate(turns, repeats) -> dict:
    """Take the turns, one after the other, `repeats` times after a warm-up -> medians, ratios to ours, all figures."""
    figures = {name: [] for name in turns}
    for number in tqdm(range(repeats + 1), desc="turns", file=sys.stderr, disable=None):
        for name, turn in turns.items():
            found = turn()
            if number:
                figures[name].append(found)
    medians = {name: {key: statistics.median(found[key] for found in all_found) for key in all_found[0]}
               for name, all_found in figures.items()}
    ratios = {f"ours / {name}": {key: medians["ours"][key] / max(value, 1e-9) for key, value in found.items()}
              for name, found in medians.items() if name != "ours"}
    return {"median": medians, "ratio": ratios, "all": figures}


def resident(key) -> float:
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024 / 1e9


if __name__ == "__main__":
    main()
