"""A trial: one task, one reply of the model, one verdict of the sandbox -> `Trial`.

The reply may think first (text up to `</think>` is never looked at); its last fenced Python block is the solution.
Trials run as coroutines: each awaits the sampler, then the sandbox, so that grading goes on while others are sampled.

Who is to blame decides what a trial is worth. An infrastructure failure is excluded: it has no reward, no gradient
and no place in the baseline. Everything else is the policy's doing. Some endings carry the name that the published
run gives them, and its lists say how they are treated (`sandbox.passthrough`, `mask`, `zero`; unlisted is zero):

    verdict timeout                VerifierTimeoutError
    verdict oom                    VerifierRuntimeError
    reply cut at max_new_tokens    OutputLengthExceededError
    context cut at max_model_len   ContextLengthExceededError
    test.sh, no reward             RewardFileNotFoundError, RewardFileEmptyError, VerifierOutputParseError

    passthrough   trained with the reward that the tests gave
    mask          excluded, as if infrastructure had failed
    zero          reward 0 in the baseline of its group, no trained token of its own

Leaves out: more than one turn.
"""

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from quarantine import parse_fault
from rollout import Request
from sandbox import Sandbox, gradable

REQUEST = "Put the complete solution in one Python code block."
FENCED = re.compile(r"^```([^\n`]*)\n(.*?)^```[ \t\r]*$", re.MULTILINE | re.DOTALL)
PYTHON = ("python", "py", "python3", "")


@dataclass
class Trial:
    """All that is known of one trial; lists and numbers only. response_ids, loss_mask and logprobs are aligned."""
    task: str                   # task id
    group: int                  # index of the task in the step
    sample: int                 # index of the trial in its group
    seed: tuple[int, ...]       # key of its random numbers
    messages: list[dict]        # role, content
    prompt_ids: list[int]
    response_ids: list[int]     # everything after the prompt
    loss_mask: list[int]        # 1 exactly on the sampled tokens that are trained
    logprobs: list[float]       # the sampler's, of the temperature-scaled policy, nats
    reward: float | None        # None: excluded
    outcome: str                # of the sandbox: passed failed error timeout oom infra
    ending: str                 # "" or the published exception name
    excluded: bool
    truncated: bool
    tests: dict[str, str] = field(default_factory=dict)
    output: str = ""
    entropy: float = 0.0        # mean over the sampled tokens, nats
    truncated_mass: float = 0.0  # mean probability that top-k and top-p cut off
    advantage: float = 0.0
    seconds_sampling: float = 0.0
    seconds_grading: float = 0.0


def solution_of(reply: str, thinking=False) -> str | None:
    """The last fenced Python block after the thinking; None when there is no closed block.

    `thinking`: the prompt has opened the thinking already, as some chat templates do.
    """
    if (thinking or "<think>" in reply) and "</think>" not in reply:
        return None
    blocks = FENCED.findall(reply.rpartition("</think>")[2])
    python = [code for label, code in blocks if label.strip().lower() in PYTHON]
    return python[-1] if python else None


def messages_for(task) -> list[dict]:
    return [{"role": "user", "content": f"{task.instruction.rstrip()}\n\n{REQUEST}"}]


def render(task, tokenizer, enable_thinking) -> list[int]:
    """Prompt ids of a task: the chat template is rendered once, here, and never again."""
    text = tokenizer.apply_chat_template(messages_for(task), tokenize=False, add_generation_prompt=True,
                                         enable_thinking=enable_thinking)
    return tokenizer(text, add_special_tokens=False).input_ids


def open_sandbox(config) -> Sandbox:
    """The sandbox of the config's section. ValueError: this machine does not let code be isolated as it asks."""
    try:
        return Sandbox(config.workers, config.timeout_s, config.memory_mb, config.isolation, config.retries,
                       config.reward)
    except RuntimeError as error:
        raise ValueError(f"sandbox.isolation: {error}") from error


def usable_tasks(tasks, tokenizer, config, report) -> list:
    """The tasks that can be tried and graded; each other one is named to `report`. ValueError: none is left."""
    usable, limit = [], config.rollout.max_model_len
    for task in tasks:
        length = len(render(task, tokenizer, config.model.enable_thinking))
        if length >= limit:
            report(f"task {task.id}: skipped, its prompt of {length} tokens leaves no room in rollout.max_model_len "
                   f"{limit}")
        elif not gradable(task):
            report(f"task {task.id}: skipped, it has no tests/test_*.py and no tests/test.sh")
        elif fault := parse_fault(task):
            report(f"task {task.id}: skipped, {fault}")
        else:
            usable.append(task)
    if not usable:
        raise ValueError(f"no task is left of {len(tasks)}: no tests, or prompts that fill rollout.max_model_len "
                         f"{limit}")
    return usable


def run_trials(tasks, samples, *, sampler, sandbox, tokenizer, config, seed_of, first_group=0, stride=1,
               progress=lambda trial: None) -> list[Trial]:
    """`samples` trials of each task, ordered by group, then sample.

    seed_of(group, sample) -> key of the random numbers. Groups are numbered from first_group by stride, so that ranks
    can share one step. `progress` is called with each finished trial.
    """
    prompts = [render(task, tokenizer, config.model.enable_thinking) for task in tasks]

    async def all_trials():
        with ThreadPoolExecutor(config.sandbox.workers) as graders:
            async def trial(index, sample):
                group = first_group + index * stride
                result = await _trial(tasks[index], prompts[index], group, sample, seed_of(group, sample), sampler,
                                      sandbox, tokenizer, config, graders)
                progress(result)
                return result

            trials = [trial(index, sample) for index in range(len(tasks)) for sample in range(samples)]
            _, *results = await asyncio.gather(sampler.drive(), *trials)
            return results

    return asyncio.run(all_trials())


async def _trial(task, prompt_ids, group, sample, seed, sampler, sandbox, tokenizer, config, graders) -> Trial:
    start = time.perf_counter()
    completion = await sampler.sample(Request(prompt_ids, seed))
    sampled = time.perf_counter()
    reply = tokenizer.decode(completion.ids, skip_special_tokens=True)
    code = solution_of(reply, thinking=tokenizer.decode(prompt_ids).rstrip().endswith("<think>"))
    if code is None:
        outcome, reward, tests, output = "error", 0.0, {}, "the reply has no closed Python code block"
        ending = ""
    else:
        loop = asyncio.get_running_loop()
        verdict = await loop.run_in_executor(graders, sandbox.grade, task, {"solution.py": code})
        outcome, reward, tests, output = verdict.outcome, verdict.reward, verdict.tests, verdict.output
        ending = verdict.ending
    ending = ending or ending_of(outcome, completion.stopped_by)
    reward, excluded, trained = treatment(outcome, ending, reward, config.sandbox)
    if config.algorithm.mask_truncated and completion.truncated:
        trained = False
    tokens = len(completion.ids)
    return Trial(task=task.id, group=group, sample=sample, seed=seed,
                 messages=messages_for(task) + [{"role": "assistant", "content": reply}],
                 prompt_ids=prompt_ids, response_ids=completion.ids, loss_mask=[int(trained)] * tokens,
                 logprobs=completion.logprobs, reward=reward, outcome=outcome, ending=ending, excluded=excluded,
                 truncated=completion.truncated, tests=tests, output=output,
                 entropy=sum(completion.entropies) / tokens,
                 truncated_mass=sum(completion.truncated_mass) / tokens,
                 seconds_sampling=sampled - start, seconds_grading=time.perf_counter() - sampled)


def ending_of(outcome, stopped_by) -> str:
    """The published exception name of an ending, "" for an ordinary one. What the sandbox saw goes first."""
    if outcome == "timeout":
        return "VerifierTimeoutError"
    if outcome == "oom":
        return "VerifierRuntimeError"
    return {"max_new_tokens": "OutputLengthExceededError", "max_model_len": "ContextLengthExceededError"}.get(
        stopped_by, "")


def treatment(outcome, ending, reward, sandbox_config) -> tuple[float | None, bool, bool]:
    """-> (reward, excluded, trained) of a trial, by the lists of the config in the order the published run has."""
    if outcome == "infra":
        return None, True, False
    if not ending or ending in sandbox_config.passthrough:
        return reward, False, True
    if ending in sandbox_config.mask:
        return None, True, False
    return 0.0, False, False
