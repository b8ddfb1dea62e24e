"""The configuration: a JSON file -> frozen dataclasses, one a section, with every key checked.

The dataclasses are the reference: type, limits and meaning of a key stand on its line. None has a default:
rl_config.json holds them all; a file may say `"extends": "../rl_config.json"` (relative to itself, chains
allowed) and only what differs. An override `section.key=value`, its value JSON or plain text, beats files.
A mistake raises ValueError, one line: file (or "override"), section.key, what was expected, what was found.
Left out: environment variables, interpolation, sweeps.
"""

import difflib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

# Annotated[type, what an error says is expected, test of a JSON value, conversion where JSON lacks the type].
NUMBER, LARGEST = (int, float), 1e308  # LARGEST refuses infinity and integers that no float can hold
Flag = Annotated[bool, "true or false", lambda x: type(x) is bool]
Text = Annotated[str, "a non-empty string", lambda x: type(x) is str and x]
TextOrNull = Annotated[str | None, "a non-empty string or null", lambda x: x is None or type(x) is str and x]
Names = Annotated[tuple[str, ...], "a list of strings",
                  lambda x: type(x) is list and all(type(y) is str for y in x), tuple]
From0 = Annotated[int, "an integer >= 0", lambda x: type(x) is int and x >= 0]
From1 = Annotated[int, "an integer >= 1", lambda x: type(x) is int and x >= 1]
From2 = Annotated[int, "an integer >= 2", lambda x: type(x) is int and x >= 2]
From64 = Annotated[int, "an integer >= 64", lambda x: type(x) is int and x >= 64]
TopK = Annotated[int, "-1 or an integer >= 1", lambda x: type(x) is int and (x == -1 or x >= 1)]
NotNegative = Annotated[float, "a number >= 0", lambda x: type(x) in NUMBER and 0 <= x <= LARGEST, float]
Positive = Annotated[float, "a number > 0", lambda x: type(x) in NUMBER and 0 < x <= LARGEST, float]
TopP = Annotated[float, "a number > 0 and <= 1", lambda x: type(x) in NUMBER and 0 < x <= 1, float]
Share = Annotated[float, "a number >= 0 and <= 1", lambda x: type(x) in NUMBER and 0 <= x <= 1, float]
Below1 = Annotated[float, "a number >= 0 and < 1", lambda x: type(x) in NUMBER and 0 <= x < 1, float]
Above1OrNull = Annotated[float | None, "a number > 1 or null", lambda x: x is None or type(x) in NUMBER
                         and 1 < x <= LARGEST, lambda x: x and float(x)]
Betas = Annotated[tuple[float, float], "two numbers >= 0 and < 1", lambda x: type(x) is list and len(x) == 2
                  and all(type(y) in NUMBER and 0 <= y < 1 for y in x), lambda x: tuple(map(float, x))]


@dataclass(frozen=True)
class ModelConfig:
    path: Text  # "warmstart", a local folder or a Hub id
    dtype: Literal["float32", "bfloat16"]  # of the forward pass
    attn_implementation: Literal["sdpa", "eager"]
    gradient_checkpointing: Flag  # recompute activations in the backward pass: less memory, more time
    chat_template: TextOrNull  # a .jinja file; null: the tokenizer's own
    enable_thinking: Flag  # handed to the chat template

@dataclass(frozen=True)
class DataConfig:
    train: Text  # task set
    eval: TextOrNull  # task set; null: none
    limit: From0  # train on the first so many tasks; 0: all
    quarantine: TextOrNull  # file of `tasks.py verify`: tasks that neither training nor evaluation uses; null: none

@dataclass(frozen=True)
class RolloutConfig:
    n_samples_per_prompt: From2  # group size; one alone has nothing that its reward could be compared with
    temperature: Positive  # logits are divided by it, in sampling and in the loss
    top_p: TopP  # nucleus sampling; 1: off
    top_k: TopK  # sample from the k likeliest tokens; -1: off
    max_new_tokens: From1  # of one reply
    max_model_len: From2  # tokens of prompt and replies together
    batch_slots: From1  # sequences that one process decodes side by side

@dataclass(frozen=True)
class AgentConfig:
    kind: Literal["single_turn"]  # one reply, then grading

@dataclass(frozen=True)
class SandboxConfig:
    workers: From1  # runs that one process grades at once
    timeout_s: Positive  # wall seconds of one run
    memory_mb: From64  # MiB of one run
    isolation: Literal["auto", "none"]  # auto: the best this machine allows, or refuse; none: limits only
    retries: From0  # further attempts after an infrastructure failure
    max_infra_share: Share  # of a step's trials without a verdict; with more the run ends
    reward: Literal["binary", "pass_ratio"]  # 1 if every test passes, or the share that passes; a test.sh says it
    mask: Names  # exceptions that take a trial out of its group: no gradient, not in the baseline
    zero: Names  # exceptions scored 0 and kept in the baseline, as is every exception that no list names
    passthrough: Names  # exceptions after which the verifier's reward counts all the same

@dataclass(frozen=True)
class AlgorithmConfig:
    advantage_estimator: Literal["rloo_n", "rloo", "grpo"]  # rloo_n: rloo over the trials that are not masked
    group_advantage_min_size: From2  # a group with fewer such trials has advantage 0
    loss_reduction: Literal["token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm",
                            "token_mean_legacy"]  # how the token losses of a step become one number
    count_empty_rows: Flag  # sequence_mean: a trial without trained tokens counts as a row
    eps_clip_low: Below1  # PPO clip: ratio >= 1 - it
    eps_clip_high: NotNegative  # PPO clip: ratio <= 1 + it
    clip_ratio_c: Above1OrNull  # dual clip: bounds the loss where the advantage is negative; null: off
    use_tis: Flag  # truncated importance sampling: weigh tokens by trainer over sampler probability
    tis_imp_ratio_cap: Positive  # the largest such weight; read only with use_tis
    kl_loss_coef: NotNegative  # weight of the KL to the start model; 0: no reference model
    kl_estimator_type: Literal["k1", "k2", "k3"]
    mask_truncated: Flag  # no gradient from a reply that was cut; its reward stays in the baseline

@dataclass(frozen=True)
class OptimizerConfig:
    lr: NotNegative  # AdamW, constant after the warm-up
    betas: Betas
    weight_decay: NotNegative
    max_grad_norm: Positive  # clip of the global norm
    warmup_steps: From0  # optimizer steps of linear warm-up; 0: none

@dataclass(frozen=True)
class TrainerConfig:
    run_dir: Text  # folder for metrics, traces, checkpoints and exports
    seed: From0  # data order and sampling depend on it alone
    train_batch_size: From1  # prompts of one step
    policy_mini_batch_size: From1  # prompts of one optimizer step
    update_epochs_per_batch: From1  # passes over one batch
    micro_batch_tokens: From1  # of one forward and backward pass of one process
    fsdp_size: From1  # processes that share one copy of weights, gradients, optimizer states; 1: each has all (DDP)
    epochs: From1  # passes over the task set
    max_steps: From1  # stop there, whatever epochs says
    eval_interval: From0  # steps between evaluations; 0: none
    eval_samples: From1  # trials of one task in an evaluation
    sample_interval: From0  # steps between printed samples of completions; 0: none
    ckpt_interval: From0  # steps between checkpoints to resume from; 0: none
    hf_save_interval: From0  # steps between exports in the Hugging Face layout; 0: none
    resume_mode: Literal["latest", "none"]  # go on from the newest checkpoint of run_dir, or begin anew
    keep_checkpoints: From1  # how many of the newest checkpoints are kept
    log_with: Names  # accelerate trackers, as in ["tensorboard"]

@dataclass(frozen=True)
class Config:
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    agent: AgentConfig
    sandbox: SandboxConfig
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig


SECTIONS = {section.name: section.type for section in fields(Config)}
KEYS = {f"{section}.{item.name}": item.type for section, part in SECTIONS.items() for item in fields(part)}


def load_config(path: str, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read `path` and what it extends, apply the overrides, check the result. ValueError: one line."""
    settings: dict[str, tuple[str, Any]] = {}  # "section.key" -> the file that holds it, the JSON value
    for file, content in [*_layers(path), *map(_override, overrides)]:
        for section, values in content.items():
            if section not in SECTIONS:
                raise ValueError(f"{file}: section {json.dumps(section)} is none of {', '.join(SECTIONS)}")
            if type(values) is not dict:
                raise ValueError(f"{file}: {section}: expected an object, found {json.dumps(values)}")
            for name, value in values.items():
                if (full := f"{section}.{name}") not in KEYS:
                    near = difflib.get_close_matches(full, KEYS, 1, cutoff=0)[0]
                    raise ValueError(f"{file}: unknown key {json.dumps(full)}; the nearest is {near}")
                settings[full] = file, value
    parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for full, kind in KEYS.items():
        if get_origin(kind) is Literal:
            expected, allowed, *convert = "one of " + ", ".join(get_args(kind)), get_args(kind).__contains__
        else:
            _, expected, allowed, *convert = get_args(kind)
        if full not in settings:
            raise ValueError(f"{path}: {full}: missing, expected {expected}")
        file, value = settings[full]
        if not allowed(value):
            raise ValueError(f"{file}: {full}: expected {expected}, found {json.dumps(value)}")
        section, name = full.split(".")
        parts[section][name] = convert[0](value) if convert else value
    config = Config(**{section: part(**parts[section]) for section, part in SECTIONS.items()})
    for full, holds, expected in _joint_limits(config):
        if not holds:
            file, value = settings[full]
            raise ValueError(f"{file}: {full}: expected {expected}, found {json.dumps(value)}")
    return config


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """As plain JSON values: the content of a file that extends nothing."""
    return json.loads(json.dumps(asdict(config)))


def save_config(config: Config, path: str) -> None:
    """Write the resolved config into an existing folder; `load_config(path)` gives an equal one."""
    Path(f"{path}.tmp").write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")
    os.replace(f"{path}.tmp", path)


def batch_plan(config: Config, world_size: int, n_tasks: int) -> dict[str, int]:
    """The arithmetic of a run of n_tasks, after limit and quarantine. ValueError: too few tasks or processes."""
    trainer, prompts = config.trainer, config.trainer.train_batch_size
    if n_tasks < prompts:
        raise ValueError(f"data.train: {n_tasks} tasks are fewer than trainer.train_batch_size ({prompts})")
    if world_size % trainer.fsdp_size:
        raise ValueError(f"trainer.fsdp_size: {trainer.fsdp_size} does not divide the processes ({world_size})")
    trajectories = prompts * config.rollout.n_samples_per_prompt
    mini_batches, steps_per_epoch = prompts // trainer.policy_mini_batch_size, n_tasks // prompts
    return {
        "prompts_per_step": prompts,
        "trajectories_per_step": trajectories,
        "trajectories_per_process": -(-trajectories // world_size),  # rounded up: the most loaded process
        "optimizer_steps_per_batch": mini_batches * trainer.update_epochs_per_batch,
        "steps_per_epoch": steps_per_epoch,
        "total_steps": min(trainer.epochs * steps_per_epoch, trainer.max_steps),
        "max_response_tokens_per_step": trajectories * config.rollout.max_new_tokens,
    }


def _layers(path: str, children: tuple[str, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """(file, content) of what `path` extends, then of `path`; `children` are the files that lead to it."""
    trail = ": extends: ".join([*children, path])
    if os.path.realpath(path) in map(os.path.realpath, children):
        raise ValueError(f"{trail}: a file may not extend itself")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_object)
    except (OSError, ValueError) as error:  # of invalid JSON, `error` says line and column
        raise ValueError(f"{trail}: cannot be read: {error}") from None
    if type(content) is not dict:
        raise ValueError(f"{path}: expected an object, found {json.dumps(content)}")
    if (parent := content.pop("extends", None)) is None:
        return [(path, content)]
    if type(parent) is not str:
        raise ValueError(f"{path}: extends: expected a string, found {json.dumps(parent)}")
    return [*_layers(os.path.normpath(Path(path).parent / parent), (*children, path)), (path, content)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"key {json.dumps(max(names, key=names.count))} is given twice in one object")
    return dict(pairs)


def _override(text: str) -> tuple[str, dict[str, Any]]:
    target, equals, value = text.partition("=")
    section, dot, name = target.partition(".")
    if not (equals and dot):
        raise ValueError(f"override: expected section.key=value, found {json.dumps(text)}")
    try:
        return "override", {section: {name: json.loads(value)}}
    except ValueError:
        return "override", {section: {name: value}}


def _joint_limits(config: Config) -> list[tuple[str, bool, str]]:
    """(section.key, does its limit hold, what is expected) where the limit depends on another key."""
    r, a, s, t = config.rollout, config.algorithm, config.sandbox, config.trainer
    n, batch, mini = r.n_samples_per_prompt, t.train_batch_size, t.policy_mini_batch_size
    return [
        ("rollout.max_new_tokens", r.max_new_tokens < r.max_model_len, f"< max_model_len {r.max_model_len}"),
        ("algorithm.group_advantage_min_size", a.group_advantage_min_size <= n, f"<= group size {n}"),
        ("trainer.policy_mini_batch_size", batch % mini == 0, f"a divisor of train_batch_size {batch}"),
        ("data.eval", config.data.eval or not t.eval_interval, f"a set for eval_interval {t.eval_interval}"),
        ("sandbox.zero", not {*s.zero} & {*s.mask}, "no name that mask has"),
        ("sandbox.passthrough", not {*s.passthrough} & {*s.mask, *s.zero}, "no name that mask or zero has"),
    ]
