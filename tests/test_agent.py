"""agent.py: the solution in a reply, who is to blame for an ending, trials with a scripted sampler and sandbox."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent import REQUEST, ending_of, messages_for, render, run_trials, solution_of, treatment, usable_tasks
from config import load_config
from rollout import Completion, Sampler

BASE = str(Path(__file__).resolve().parent.parent / "rl_config.json")
BLOCK = "```python\nx = 1\n```"


def settings(*overrides):
    return load_config(BASE, ["rollout.max_model_len=400", "rollout.max_new_tokens=8", "sandbox.workers=4",
                              "rollout.top_k=-1", "rollout.top_p=1", *overrides])


@pytest.mark.parametrize("reply, expected", [
    (BLOCK, "x = 1\n"),
    (f"Here it is:\n\n{BLOCK}\nDone.", "x = 1\n"),
    ("```\nx = 1\n```", "x = 1\n"),
    ("```py\nx = 1\n```", "x = 1\n"),
    ("``` Python3 \nx = 1\n```  \nbye", "x = 1\n"),
    ("```python\n```", ""),
    ("```python\nx = 1\n\ndef f():\n    return 2\n```", "x = 1\n\ndef f():\n    return 2\n"),
    (f"{BLOCK}\nor better\n```python\nx = 2\n```", "x = 2\n"),
    (f"{BLOCK}\nrun it:\n```bash\npython solution.py\n```", "x = 1\n"),
    (f"{BLOCK}\nand now\n```python\nx = 2", "x = 1\n"),
    ("```python\r\nx = 1\r\n```\r\nDone.\r\n", "x = 1\r\n"),
    ("```python\nx = '''a ``` b'''\n```", "x = '''a ``` b'''\n"),
    (f"<think>\n```python\nx = 0\n```\n</think>\n{BLOCK}", "x = 1\n"),
    (f"{BLOCK}\n</think>\nno block", None),
    (f"the prompt opened the thinking\n</think>{BLOCK}", "x = 1\n"),
    (f"<think></think>\n<think>again</think>\n{BLOCK}", "x = 1\n"),
    (f"<think>\n{BLOCK}\nstill thinking", None),
    (f"<think>\n{BLOCK}\n</think>\nThe answer is above.", None),
    ("x = 1", None),
    ("", None),
    ("```python\nx = 1", None),
    ("```python x = 1```", None),
    ("```javascript\nlet x = 1\n```", None),
    ("   ```python\n   x = 1\n   ```", None),  # a fence stands at the start of a line
])
def test_solution_of(reply, expected):
    assert solution_of(reply) == expected


def test_thinking_that_the_prompt_opened_is_never_searched_for_code():
    assert solution_of(f"first try\n{BLOCK}", thinking=True) is None
    assert solution_of(f"first try\n```python\nx = 0\n```\n</think>\n{BLOCK}", thinking=True) == "x = 1\n"


@pytest.mark.parametrize("outcome, stopped_by, expected", [
    ("passed", "eos", ""), ("failed", "eos", ""), ("error", "eos", ""), ("infra", "eos", ""),
    ("timeout", "eos", "VerifierTimeoutError"), ("timeout", "max_new_tokens", "VerifierTimeoutError"),
    ("oom", "eos", "VerifierRuntimeError"), ("oom", "max_model_len", "VerifierRuntimeError"),
    ("passed", "max_new_tokens", "OutputLengthExceededError"), ("error", "max_new_tokens", "OutputLengthExceededError"),
    ("failed", "max_model_len", "ContextLengthExceededError"),
])
def test_ending_of(outcome, stopped_by, expected):
    assert ending_of(outcome, stopped_by) == expected


@pytest.mark.parametrize("outcome, ending, expected", [
    ("passed", "", (0.75, False, True)),
    ("failed", "", (0.75, False, True)),
    ("error", "", (0.75, False, True)),
    ("infra", "", (None, True, False)),
    ("infra", "Passed", (None, True, False)),  # whatever the lists say
    ("passed", "Passed", (0.75, False, True)),
    ("timeout", "Masked", (None, True, False)),
    ("oom", "Zeroed", (0.0, False, False)),
    ("passed", "Unlisted", (0.0, False, False)),
])
def test_treatment(outcome, ending, expected):
    lists = settings('sandbox.passthrough=["Passed"]', 'sandbox.mask=["Masked"]', 'sandbox.zero=["Zeroed"]').sandbox
    assert treatment(outcome, ending, 0.75, lists) == expected


@dataclass
class FakeTask:
    id: str
    instruction: str = "Write x.\n"
    files: dict = field(default_factory=lambda: {"tests/test_solution.py": b""})


class CharacterTokenizer:
    """One id a character; the template marks the prompt, so that a second rendering would show."""

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, enable_thinking):
        assert not tokenize and add_generation_prompt
        return f"<user>{messages[0]['content']}<assistant{'+' if enable_thinking else '-'}>"

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[ord(character) for character in text])

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if i)  # 0 is the EOS


class ScriptedSampler:
    """Replies by (group, sample); what is not scripted is a reply without code."""

    def __init__(self, replies):
        self.replies, self.requests, self.driven = replies, [], 0

    async def drive(self):
        self.driven += 1

    async def sample(self, request):
        self.requests.append(request)
        reply, stopped_by = self.replies.get(request.key[-2:], ("no code", "eos"))
        ids = [ord(character) for character in reply] + [0] * (stopped_by == "eos")
        return Completion(ids, [-0.5] * len(ids), [0.25] * len(ids), [0.125] * len(ids), stopped_by)


@dataclass
class ScriptedSandbox:
    """The solution names its verdict: `outcome reward` and perhaps an ending."""
    graded: list = field(default_factory=list)

    def grade(self, task, files):
        outcome, reward, *ending = files["solution.py"].split()
        self.graded.append((task.id, outcome))
        return SimpleNamespace(outcome=outcome, reward=None if outcome == "infra" else float(reward),
                               ending="".join(ending), tests={"test_x": outcome}, output=f"said {outcome}")


def code(verdict):
    return f"```python\n{verdict}\n```"


def trials_of(replies, config=None, tasks=2, samples=2, **more):
    sampler, sandbox = ScriptedSampler(replies), ScriptedSandbox()
    trials = run_trials([FakeTask(f"task{i}") for i in range(tasks)], samples, sampler=sampler, sandbox=sandbox,
                        tokenizer=CharacterTokenizer(), config=config or settings(),
                        seed_of=lambda group, sample: (42, 0, 3, group, sample), **more)
    return trials, sampler, sandbox


def test_trials_hold_what_happened():
    passed, length = code("passed 1"), len(code("passed 1")) + 1
    trials, sampler, sandbox = trials_of({(0, 0): (passed, "eos"), (1, 1): (code("failed 0.25"), "eos")})
    assert [(trial.task, trial.group, trial.sample) for trial in trials] == [
        ("task0", 0, 0), ("task0", 0, 1), ("task1", 1, 0), ("task1", 1, 1)]
    assert [trial.outcome for trial in trials] == ["passed", "error", "error", "failed"]
    assert [trial.reward for trial in trials] == [1.0, 0.0, 0.0, 0.25]
    assert sorted(sandbox.graded) == [("task0", "passed"), ("task1", "failed")] and sampler.driven == 1

    first, content = trials[0], f"Write x.\n\n{REQUEST}"
    assert first.messages == [{"role": "user", "content": content}, {"role": "assistant", "content": passed}]
    assert first.prompt_ids == [ord(character) for character in f"<user>{content}<assistant+>"]
    assert first.response_ids == [*map(ord, passed), 0]  # as sampled, the EOS included
    assert first.loss_mask == [1] * length and first.logprobs == [-0.5] * length
    assert (first.seed, first.ending, first.excluded, first.truncated) == ((42, 0, 3, 0, 0), "", False, False)
    assert (first.tests, first.output) == ({"test_x": "passed"}, "said passed")
    assert (first.entropy, first.truncated_mass, first.advantage) == (0.25, 0.125, 0.0)
    assert 0 <= first.seconds_sampling and 0 <= first.seconds_grading < 5
    assert trials[1].output == "the reply has no closed Python code block" and trials[1].tests == {}


@pytest.mark.parametrize("reply, stopped_by, expected", [  # expected: outcome, ending, reward, excluded, mask
    (code("passed 1"), "max_new_tokens", ("passed", "OutputLengthExceededError", 0.0, False, 0)),
    ("no code", "max_model_len", ("error", "ContextLengthExceededError", None, True, 0)),
    (code("timeout 0"), "eos", ("timeout", "VerifierTimeoutError", 0.0, False, 0)),
    (code("oom 0.5"), "eos", ("oom", "VerifierRuntimeError", 0.5, False, 1)),
    (code("infra 0"), "eos", ("infra", "", None, True, 0)),
    (code("error 0"), "eos", ("error", "", 0.0, False, 1)),
    (code("error 0 RewardFileEmptyError"), "eos", ("error", "RewardFileEmptyError", None, True, 0)),
    (code("error 0 VerifierOutputParseError"), "eos", ("error", "VerifierOutputParseError", 0.0, False, 0)),
])
def test_the_lists_of_the_config_decide(reply, stopped_by, expected):
    config = settings('sandbox.passthrough=["VerifierRuntimeError"]')
    trial = trials_of({(0, 0): (reply, stopped_by)}, config)[0][0]
    assert (trial.outcome, trial.ending, trial.reward, trial.excluded, trial.loss_mask[0]) == expected
    assert len(set(trial.loss_mask)) == 1 and len(trial.loss_mask) == len(trial.response_ids) == len(trial.logprobs)
    assert trial.truncated == (stopped_by != "eos")


def test_masked_truncation_keeps_the_reward_and_trains_nothing():
    for masked in ("true", "false"):
        config = settings('sandbox.passthrough=["OutputLengthExceededError"]', f"algorithm.mask_truncated={masked}")
        replies = {(0, 0): (code("passed 1"), "max_new_tokens"), (0, 1): (code("passed 1"), "eos")}
        cut, whole = trials_of(replies, config, tasks=1)[0]
        assert (cut.reward, cut.excluded, cut.loss_mask[0]) == (1.0, False, int(masked == "false"))
        assert whole.loss_mask[0] == 1


def test_groups_are_numbered_for_a_rank_and_progress_is_told():
    seen = []
    trials, sampler, _ = trials_of({}, tasks=3, first_group=1, stride=4, progress=seen.append)
    assert [trial.group for trial in trials] == [1, 1, 5, 5, 9, 9]
    assert sorted(request.key for request in sampler.requests) == [(42, 0, 3, g, s) for g in (1, 5, 9) for s in (0, 1)]
    assert sorted(map(id, seen)) == sorted(map(id, trials))
    assert trials_of({}, tasks=0)[0] == []


def test_verdicts_are_sought_side_by_side():
    together = threading.Barrier(4, timeout=10)  # broken, and the test with it, unless four gradings overlap

    class MeetingSandbox(ScriptedSandbox):
        def grade(self, task, files):
            together.wait()
            return super().grade(task, files)

    sampler = ScriptedSampler({(g, s): (code("passed 1"), "eos") for g in (0, 1) for s in (0, 1)})
    trials = run_trials([FakeTask("a"), FakeTask("b")], 2, sampler=sampler, sandbox=MeetingSandbox(),
                        tokenizer=CharacterTokenizer(), config=settings(), seed_of=lambda *key: key)
    assert [trial.reward for trial in trials] == [1.0] * 4


class BrokenSandbox:
    def grade(self, task, files):
        raise RuntimeError("the sandbox is broken")


def test_an_error_of_the_sandbox_is_not_swallowed():
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match="the sandbox is broken"):
        run_trials([FakeTask("a")], 2, sampler=ScriptedSampler({(0, 1): (code("passed 1"), "eos")}), config=settings(),
                   sandbox=BrokenSandbox(), tokenizer=CharacterTokenizer(), seed_of=lambda *key: key)
    assert time.perf_counter() - began < 5


def test_two_ranks_sample_what_one_process_samples():
    torch.manual_seed(2)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3)).double()
    tasks, config = [FakeTask(f"t{i}", f"Write {i}.") for i in range(3)], settings("rollout.batch_slots=5")

    def sampled(rank, world):
        return run_trials(tasks[rank::world], 3, sampler=Sampler(model, {10}, config.rollout), config=config,
                          sandbox=ScriptedSandbox(), tokenizer=CharacterTokenizer(), first_group=rank, stride=world,
                          seed_of=lambda group, sample: (0, group, sample))

    def facts(trials):
        return {(t.task, t.group, t.sample): (t.prompt_ids, t.response_ids, t.seed) for t in trials}

    whole = sampled(0, 1)
    assert len({tuple(trial.response_ids) for trial in whole}) == 9
    assert facts(whole) == facts(sampled(0, 2)) | facts(sampled(1, 2))


def test_usable_tasks_leave_out_what_has_no_room_or_no_tests():
    tokenizer, lines = CharacterTokenizer(), []
    tasks = [FakeTask("short"), FakeTask("full", "x" * 400), FakeTask("also short"),
             FakeTask("bare", files={"tests/data.txt": b""}), FakeTask("script", files={"tests/test.sh": b""}),
             FakeTask("broken", files={"tests/test_a.py": b"def"})]
    length = len(render(tasks[0], tokenizer, True))
    assert length == len(f"<user>{messages_for(tasks[0])[0]['content']}<assistant+>")
    config = settings(f"rollout.max_model_len={length + 1}")
    usable = usable_tasks(tasks, tokenizer, config, lines.append)
    assert [task.id for task in usable] == ["short", "also short", "script"]
    assert len(lines) == 3 and "task full" in lines[0] and f"max_model_len {length + 1}" in lines[0]
    assert lines[1] == "task bare: skipped, it has no tests/test_*.py and no tests/test.sh"
    assert lines[2].startswith("task broken: skipped, its tests do not parse: tests/test_a.py: invalid syntax")
    with pytest.raises(ValueError, match=f"no task is left of 6: no tests, or prompts that fill .* {length}"):
        usable_tasks(tasks, tokenizer, settings(f"rollout.max_model_len={length}"), lines.append)
