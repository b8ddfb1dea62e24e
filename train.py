"""RLOO-n on unit-test rewards: sample replies, run their tests, weigh them against their group, update the policy.

    accelerate launch train.py --config configs/laptop.json
    accelerate launch train.py --config rl_config.json trainer.run_dir=runs/seqmean data.train=tasks.parquet
    python train.py --config configs/laptop.json --plan --device-gb 16

Reads top to bottom: `train` is the loop, and the functions below it are its verbs in the order of their use. Every
rank sees all trials of a step, so advantages, token weights and metrics are those of the whole step on each of them;
a rank samples the groups rank, rank + world, ... and forwards the micro-batches dealt to it.

Leaves out: asynchronous rollouts, a critic, a learned reward.
"""

import argparse
import contextlib
import copy
import json
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import gather_object, set_seed
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import advantage
import checkpoint
import compare
import traces
import warmstart
from agent import open_sandbox, run_trials, usable_tasks
from config import batch_plan, load_config, save_config, to_dict
from evaluate import EVAL_STREAM, summarise
from plan import print_plan
from quarantine import leave_out
from rollout import Sampler
from sandbox import OUTCOMES
from tasks import load_tasks
from update import Policy, distribute, update

TRAIN_STREAM = 0  # second number of a random key, beside evaluate.EVAL_STREAM
ESTIMATORS = {"rloo_n": advantage.rloo_n, "rloo": advantage.rloo, "grpo": advantage.grpo}


def main():
    parser = argparse.ArgumentParser(description="RLOO-n on unit-test rewards.", epilog=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="JSON file, e.g. configs/laptop.json")
    parser.add_argument("--plan", action="store_true", help="print config, batch arithmetic and memory plan; exit")
    planning = parser.add_argument_group("read only with --plan")
    planning.add_argument("--json", action="store_true", help="one JSON object")
    planning.add_argument("--processes", type=int, metavar="N", help="one to a device; default: trainer.fsdp_size")
    planning.add_argument("--device-gb", type=float, metavar="G", help="memory of a device, 10^9 bytes: does it fit?")
    planning.add_argument("--model-config", metavar="FILE.json",
                          help="a transformers config.json to count where model.path cannot be reached")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    try:
        config = load_config(args.config, args.overrides)
        if args.plan:
            print_plan(config, args.json, args.processes, args.device_gb, args.model_config)
        else:
            sys.exit(train(config))
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)


def train(config) -> int:
    """-> exit status: 0, or 128 + the signal that ended the run early, after what was done had been saved."""
    t = config.trainer
    run_dir = Path(t.run_dir)
    accelerator = Accelerator(mixed_precision="bf16" if config.model.dtype == "bfloat16" else "no",
                              log_with=trackers(t.log_with), project_dir=t.run_dir)
    say = print if accelerator.is_main_process else lambda *_: None
    if accelerator.distributed_type not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ValueError(f"accelerate's distributed_type is {accelerator.distributed_type.value}: launch with NO or "
                         "MULTI_GPU, it is trainer.fsdp_size that shards the states")
    prepare_run_dir(run_dir, config, accelerator, say)
    set_seed(t.seed)

    tasks = leave_out(load_tasks(config.data.train, config.data.limit), config.data.quarantine, say)
    eval_tasks = leave_out(load_tasks(config.data.eval), config.data.quarantine, say) if t.eval_interval > 0 else []
    config = warmstart.resolve(config, accelerator)
    model, tokenizer = checkpoint.load_model(config.model)
    tasks = usable_tasks(tasks, tokenizer, config, say)
    eval_tasks = usable_tasks(eval_tasks, tokenizer, config, say) if eval_tasks else []
    numbers = batch_plan(config, accelerator.num_processes, len(tasks))
    say("  ".join(f"{name} {number}" for name, number in numbers.items()))

    reference, sampling_model = None, model
    if config.algorithm.kl_loss_coef > 0:
        reference = distribute(Policy(copy.deepcopy(model)).requires_grad_(False).eval(), accelerator, t.fsdp_size)
    if config.model.dtype == "bfloat16" or t.fsdp_size > 1:  # trained in float32, maybe in pieces: a whole copy samples
        sampling_model = copy.deepcopy(model).to(accelerator.device, checkpoint.DTYPES[config.model.dtype])
    policy = distribute(Policy(model), accelerator, t.fsdp_size)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.optimizer.lr)
    start = checkpoint.resume(run_dir, policy, optimizer, accelerator) if t.resume_mode == "latest" else 0
    refresh(sampling_model, model)
    if t.log_with:
        accelerator.init_trackers(run_dir.name)
    interrupt = Interrupt()
    sampler = Sampler(sampling_model, checkpoint.eos_ids(model, tokenizer), config.rollout, interrupt.requested)

    with open_sandbox(config.sandbox) as sandbox:

        def sample(step, stream, chosen, n, label):
            return sample_step(chosen, n, (t.seed, stream, step), label, accelerator, sampler, sandbox, tokenizer,
                               config)

        def evaluation(step):
            trials = sample(step, EVAL_STREAM, eval_tasks, t.eval_samples, f"step {step}: evaluate")
            scores = summarise(trials, sorted({1, t.eval_samples}))
            say(f"step {step:4d}  held-out  " + "  ".join(f"{name} {shown(score)}" for name, score in scores.items()))
            show_samples(trials, say)
            return {f"eval/{name}": score for name, score in scores.items()}

        step = start
        try:
            if start == 0 and eval_tasks:
                record(run_dir, {"step": 0} | evaluation(0), accelerator)
            for step in range(start + 1, numbers["total_steps"] + 1):
                began = time.perf_counter()
                set_seed(int(np.random.default_rng((t.seed, step)).integers(2**32)))  # so a resumed run has it too
                chosen = tasks_of_step(tasks, step, t.train_batch_size, t.seed)
                trials = sample(step, TRAIN_STREAM, chosen, config.rollout.n_samples_per_prompt, f"step {step}: sample")
                sampled = time.perf_counter()
                report_lost(trials, step, config.sandbox.max_infra_share, say)
                with interrupt.deferred():
                    set_advantages(trials, config.algorithm)
                    metrics = {"step": step} | rollout_metrics(trials)
                    with tqdm(desc=f"step {step}: update", unit="micro-batch", leave=False,
                              disable=not accelerator.is_main_process) as bar:
                        metrics |= update(policy, reference, optimizer, accelerator, trials, step, config, bar.update)
                    refresh(sampling_model, model)
                    metrics |= {"time/rollout": sampled - began, "time/update": time.perf_counter() - sampled,
                                "time/step": time.perf_counter() - began}
                    say(readable(metrics, numbers["total_steps"]))
                    last = step == numbers["total_steps"]
                    if eval_tasks and (due(step, t.eval_interval) or last):
                        metrics |= evaluation(step)
                    elif due(step, t.sample_interval):
                        show_samples(trials, say)
                    if accelerator.is_main_process:
                        traces.write_shard(trials, step, run_dir)
                    record(run_dir, metrics, accelerator)
                    if due(step, t.ckpt_interval) or last:
                        checkpoint.save(run_dir, step, policy, optimizer, accelerator, t.keep_checkpoints)
                    if accelerator.is_main_process and (due(step, t.hf_save_interval) or last):
                        checkpoint.export(run_dir, step, sampling_model, tokenizer)
        except (InterruptedError, SandboxFails) as error:
            step -= 1  # the step under way is lost; the weights are those of the one before it
            if step > start:
                checkpoint.save(run_dir, step, policy, optimizer, accelerator, t.keep_checkpoints)
            say(f"{str(error) or 'interrupted'}: {run_dir} holds {max(step, start)} steps; "
                "the same command goes on from there")
            if isinstance(error, SandboxFails):
                return 1
            return 128 + (interrupt.signal or signal.SIGTERM)  # on this rank, or on another
        except ValueError as error:  # no input of the user's is read in the loop: a crash, with its traceback
            raise RuntimeError(f"step {step} failed") from error
    accelerator.end_training()
    if accelerator.is_main_process:
        picture = compare.plot([run_dir], run_dir / "curves.png")
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"done: {run_dir}, {step} steps, curves in {picture}, peak memory {peak_gb:.2f} GB")
    return 0


def trackers(names) -> list[str] | None:
    """The trackers that the config names. ValueError: one is not installed, which accelerate would pass over."""
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in available:
            raise ValueError(f"trainer.log_with: {name!r} is not installed here; found: "
                             f"{', '.join(available) or 'none'}")
    return list(names) or None


def prepare_run_dir(run_dir, config, accelerator, say):
    """Write the resolved config. ValueError when the folder holds a run that this one may not go on with."""
    resolved = run_dir / "rl_config.json"
    holds_a_run = (run_dir / "metrics.jsonl").exists() or checkpoint.checkpoints(run_dir)
    if config.trainer.resume_mode == "none" and holds_a_run:
        raise ValueError(f"trainer.run_dir: {run_dir} holds a run already; name another folder, or "
                         "set trainer.resume_mode to latest to go on with it")
    if resolved.exists():
        before, now = to_dict(load_config(str(resolved))), to_dict(config)
        for section, keys in now.items():
            for key, value in keys.items():
                if value != before[section][key]:
                    say(f"{run_dir}: {section}.{key} was {before[section][key]!r}, is {value!r} from here on")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, str(resolved))


def tasks_of_step(tasks, step, batch_size, seed) -> list:
    """The tasks of a step (1, 2, ...). Each epoch has its own order, a function of the seed, and whole batches only."""
    epoch, index = divmod(step - 1, len(tasks) // batch_size)
    order = np.random.default_rng((seed, epoch)).permutation(len(tasks))
    return [tasks[i] for i in order[index * batch_size:(index + 1) * batch_size]]


def sample_step(tasks, samples, key, label, accelerator, sampler, sandbox, tokenizer, config) -> list:
    """`samples` trials of each task, by group and sample, on every rank. InterruptedError on all ranks if on one."""
    rank, world = accelerator.process_index, accelerator.num_processes
    mine = tasks[rank::world]
    try:
        with tqdm(total=len(mine) * samples, desc=label, unit="trial", leave=False,
                  disable=not accelerator.is_main_process) as bar:
            trials = run_trials(mine, samples, sampler=sampler, sandbox=sandbox, tokenizer=tokenizer, config=config,
                                seed_of=lambda group, sample: (*key, group, sample), first_group=rank, stride=world,
                                progress=lambda trial: bar.update())
    except InterruptedError:
        trials = [None]
    trials = gather_object(trials)
    if None in trials:
        raise InterruptedError
    return sorted(trials, key=lambda trial: (trial.group, trial.sample))


class SandboxFails(Exception):
    """More trials of a step than sandbox.max_infra_share have no verdict; the same on all ranks."""


def report_lost(trials, step, max_share, say):
    lost = [trial for trial in trials if trial.outcome == "infra"]
    if lost:
        say(f"step {step}: {len(lost)} trials have no verdict and are excluded; task {lost[0].task}: {lost[0].output}")
    if len(lost) > max_share * len(trials):
        raise SandboxFails(f"step {step}: {len(lost)} of {len(trials)} trials have no verdict, more than "
                           f"sandbox.max_infra_share {max_share:g}")


def set_advantages(trials, algorithm):
    rewards = [0.0 if trial.excluded else trial.reward for trial in trials]
    advantages = ESTIMATORS[algorithm.advantage_estimator](
        rewards, [trial.group for trial in trials], [trial.excluded for trial in trials],
        algorithm.group_advantage_min_size)
    for trial, value in zip(trials, advantages.tolist(), strict=True):
        trial.advantage = value


def rollout_metrics(trials) -> dict:
    """Means over the trials of a step, None where there is no trial. mean_finished: not truncated, not timed out."""
    scored = [trial for trial in trials if not trial.excluded]
    finished = [trial.reward for trial in scored if not trial.ending]
    solved = {trial.group for trial in scored if trial.reward > 0}
    flat = advantage.zero_variance([0.0 if trial.excluded else trial.reward for trial in trials],
                                   [trial.group for trial in trials], [trial.excluded for trial in trials])
    lengths = np.array([len(trial.response_ids) for trial in trials])
    metrics = {
        "reward/mean": mean([trial.reward for trial in scored]),
        "reward/mean_finished": mean(finished),
        "reward/pass_at_n": len(solved) / len(flat),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": int(lengths.max()),
        "rollout/truncated": mean([trial.truncated for trial in trials]),
        "rollout/frac_zero_variance": float(flat.mean()),
        "rollout/entropy": float(np.average([trial.entropy for trial in trials], weights=lengths)),
        "rollout/truncated_mass": float(np.average([trial.truncated_mass for trial in trials], weights=lengths)),
        "rollout/excluded": mean([trial.excluded for trial in trials]),
    }
    return metrics | {f"sandbox/{name}": sum(trial.outcome == name for trial in trials) for name in OUTCOMES}


def mean(values) -> float | None:
    return float(np.mean(values)) if values else None


def refresh(sampling_model, model):
    """Give the sampler the weights of the trainer, one tensor at a time; nothing to do when they are one module."""
    if sampling_model is not model:
        with torch.no_grad():
            for target, source in zip(sampling_model.parameters(), model.parameters(), strict=True):
                source = source.to(target.dtype)
                target.copy_(source.full_tensor() if isinstance(source, DTensor) else source)


def due(step, interval) -> bool:
    return interval > 0 and step % interval == 0


def record(run_dir, metrics, accelerator):
    """One line of metrics.jsonl, and the same to the trackers named in the config."""
    if accelerator.is_main_process:
        with open(run_dir / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
    step = metrics["step"]
    accelerator.log({name: value for name, value in metrics.items() if value is not None}, step=step)


def shown(value) -> str:
    return "-" if value is None else f"{value:.3f}"


def readable(metrics, total) -> str:
    m = metrics
    outcomes = " ".join(f"{name} {m['sandbox/' + name]}" for name in OUTCOMES if m["sandbox/" + name])
    return (f"step {m['step']:4d}/{total}  reward {shown(m['reward/mean'])}  length {m['rollout/length_mean']:.1f}  "
            f"truncated {m['rollout/truncated']:.2f}  flat {m['rollout/frac_zero_variance']:.2f}  "
            f"entropy {m['rollout/entropy']:.3f}  grad {m['loss/grad_norm']:.3f}  [{outcomes}]  "
            f"{m['time/rollout']:.1f} + {m['time/update']:.1f} s")


def show_samples(trials, say):
    """One trial that got the reward and one that did not, as the model wrote them."""
    for title, wanted in (("passed", True), ("not passed", False)):
        chosen = [trial for trial in trials if (trial.outcome == "passed") == wanted]
        if chosen:
            trial = chosen[0]
            say(f"--- {title}: task {trial.task}, sample {trial.sample}, {trial.outcome}\n"
                f"{trial.messages[-2]['content']}\n>>>\n{trial.messages[-1]['content']}\n---")


class Interrupt:
    """SIGINT and SIGTERM end the run at the next safe point, between two decode steps; a second one ends it at once."""

    def __init__(self):
        self.signal, self.waiting = 0, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number, _frame):
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number

    def requested(self) -> bool:
        return self.signal != 0 and not self.waiting

    @contextlib.contextmanager
    def deferred(self):
        """Inside, a request is not granted: the weights have moved and the step is to be written whole."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False


if __name__ == "__main__":
    main()
