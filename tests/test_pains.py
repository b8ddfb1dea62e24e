"""Thirty faults that users of code like this have reported, each with the right value worked by hand.

A fault has a test below ("here"), named after it, or names the test elsewhere that fails under it, or says
why this code cannot have it. The metrics that such code got wrong stand last.

 1  token mean per micro-batch or rank: here; over ranks
    test_ranks.py::test_gradients_do_not_depend_on_the_processes
 2  gradient-accumulation scaling: here (what a launcher may set);
    test_update.py::test_gradient_of_a_step_equals_the_plain_one
 3  only the last micro-batch's gradient kept: no ZeRO backend; over DDP
    test_ranks.py::test_gradients_do_not_depend_on_the_processes
 4  masked completions in the denominator
    test_update.py::test_gradient_of_a_step_equals_the_plain_one
 5  fully masked rows in the sequence mean: count_empty_rows names both ways, and the published one is true
    test_loss.py::test_reductions_with_an_empty_row
 6  reduction changed under the same name, batch written in place: here
 7  normaliser that does nothing
    test_loss.py::test_share_of_a_short_and_a_long_row
 8  std branches swapped: the std of the batch is no mode of this code
    test_advantage.py::test_grpo_standardises_within_the_group
 9  zero-variance groups: here (two ranks); with kl_loss_coef > 0 a flat group is held to the reference too
    test_advantage.py::test_flat_groups_give_exactly_zero
    test_update.py::test_a_step_without_signal_is_a_step_of_zero_gradients
10  group size 1
    test_config.py::test_wrong_types_and_values
    test_advantage.py::test_a_group_of_one_gives_zero
11  n^2 samples
    test_agent.py::test_trials_hold_what_happened
12  padding without its mask or its positions
    test_update.py::test_gradient_of_other_architectures
    test_rollout.py::test_tokens_equal_an_own_loop_of_full_forwards
13  EOS taken for padding, dropped, or followed by more
    test_update.py::test_the_first_trained_label_follows_the_prompt_and_the_eos_is_one_though_it_pads
    test_agent.py::test_trials_hold_what_happened
    test_rollout.py::test_every_eos_ends_a_row_and_is_its_last_id
14  off-by-one mask
    test_update.py::test_prompt_of_one_and_response_of_one_is_one_label
15  NaN through the mask: here; empty rows
    test_loss.py::test_an_empty_row_has_weight_zero
16  re-tokenised completions: here
17  chat template: here
18  temperature missing in logprobs
    test_update.py::test_gradient_of_a_step_equals_the_plain_one
    test_rollout.py::test_temperature_shapes_the_distribution
19  top-k and top-p on by default: here; "off" cuts nothing
    test_rollout.py::test_top_k_and_top_p_by_hand
20  generation_config of the hub leaks: here
21  sampler and trainer differ: here; dropout
    test_checkpoint.py::test_load_model_switches_every_dropout_off
22  same samples everywhere: here (two ranks); first token shared by a group
    test_rollout.py::test_draws_follow_the_softmax
23  hangs: here (two ranks)
24  logit memory: here; the reference pass is the same forward, micro-batch by micro-batch
    test_loss.py::test_fused_never_holds_all_logits
25  resume: here (data); weights and moments, learning rate
    test_checkpoint.py::test_four_steps_equal_two_and_two_after_a_resume
    test_update.py::test_gradient_clip_and_warm_up_of_the_learning_rate
26  saving: here (killed while it saves); tied head
    test_checkpoint.py::test_an_export_loads_with_equal_logits_and_a_tied_head
27  reward hangs: here
28  stale test processes: here
29  early exit passes
    test_sandbox.py::test_error_when_it_does_not_import
    test_sandbox.py::test_cheats_score_nothing_and_are_the_solutions_fault
30  wrong verdict logic: here
    metrics (mean of rank means, lengths, last micro-batch's loss): here; one reward, so no weights to forget
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import test_update  # noqa: F401  its norms stay in float64
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from test_sandbox import ADD, ADD_TESTS
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from advantage import rloo_n
from agent import REQUEST, Trial, run_trials
from checkpoint import checkpoints, resume, save
from config import load_config
from loss import token_weights
from rollout import Completion, Request, Sampler
from sandbox import Sandbox
from train import rollout_metrics, sample_step, set_advantages, tasks_of_step
from update import Policy, collate, deal, distribute, update

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, EOS = 128, 2


def settings(*overrides):
    return load_config(str(ROOT / "rl_config.json"), [
        "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4", "trainer.micro_batch_tokens=1",
        "rollout.max_new_tokens=64", "rollout.max_model_len=250", "rollout.temperature=0.7",
        "rollout.top_k=-1", "rollout.top_p=1", "rollout.batch_slots=4", "optimizer.max_grad_norm=1e9",
        "sandbox.workers=1", "algorithm.group_advantage_min_size=2", "algorithm.loss_reduction=token_mean",
        *overrides])


def language_model(dtype=torch.float64, seed=0, **more):
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
             "tie_word_embeddings": True, "eos_token_id": EOS, "pad_token_id": EOS}
    return Qwen3ForCausalLM(Qwen3Config(**sizes | more)).to(dtype).eval()


def trial(group, prompt, response, advantage, mask=None, **more):
    facts = {"logprobs": [-1.0] * len(response), "reward": 0.0, "outcome": "failed", "ending": "",
             "excluded": False, "truncated": False} | more
    return Trial(task=f"t{group}", group=group, sample=0, seed=(0,), messages=[], prompt_ids=prompt,
                 response_ids=response, loss_mask=[1] * len(response) if mask is None else mask,
                 advantage=advantage, **facts)


def updated(rows, config, accelerator=None, model=None):
    """One update with plain gradient descent -> (metrics, gradients, weights after it)."""
    accelerator, model = accelerator or Accelerator(cpu=True), model or language_model()
    policy = distribute(Policy(model), accelerator, 1)
    metrics = update(policy, None, torch.optim.SGD(policy.parameters(), lr=1.0), accelerator, rows, 1, config)
    return (metrics, {name: p.grad.clone() for name, p in model.named_parameters()},
            {name: p.detach().clone() for name, p in model.named_parameters()})


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        largest = max(1e-3, value.abs().max().item())
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12 * largest)


class Letters:
    """A tokenizer of one id a character; id 2 ends a reply."""

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, enable_thinking):
        return f"<{messages[0]['content']}>"

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if i != EOS)


class ScriptedSampler:
    """Gives sample number s of a group the ids replies[s], which end with the EOS."""

    def __init__(self, replies):
        self.replies, self.requests = replies, []

    async def drive(self):
        pass

    async def sample(self, request):
        self.requests.append(request)
        ids = self.replies[request.key[-1]]
        return Completion(ids, [-0.5] * len(ids), [0.0] * len(ids), [0.0] * len(ids), "eos")


def trials_of(replies, task, tokenizer, sandbox=None, config=None):
    sampler = ScriptedSampler(replies)
    trials = run_trials([task], len(replies), sampler=sampler, sandbox=sandbox, tokenizer=tokenizer,
                        config=config or settings(), seed_of=lambda group, sample: (group, sample))
    return trials, sampler


# ---- loss scaling ----

def four_and_one():
    """On policy the ratio is 1 and the loss of a token -A: four tokens of loss 1, one of loss 3."""
    return [trial(0, [5, 6], [7, 8, 9, EOS], -1.0), trial(1, [5, 6], [EOS], -3.0)]


@pytest.mark.parametrize("budget", [1, 1000])
def test_token_mean_is_not_taken_per_micro_batch(budget):
    metrics, _, _ = updated(four_and_one(), settings(f"trainer.micro_batch_tokens={budget}"))
    assert metrics["loss/policy"] == pytest.approx((4 * 1 + 3) / 5)  # not (1 + 3)/2


def test_gradient_accumulation_of_a_launcher_does_not_divide_the_gradient(monkeypatch):
    _, expected, _ = updated(four_and_one(), settings())
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator = Accelerator(cpu=True)
    assert accelerator.gradient_accumulation_steps == 4
    assert_close(updated(four_and_one(), settings(), accelerator)[1], expected)


def test_a_reduction_is_what_its_name_says():
    # one token and nine: 1/10 each; half of 1 and half of 1/9; 1/2 over 20
    for reduction, expected in [("token_mean", [0.1, 0.1]), ("sequence_mean", [1 / 2, 1 / 18]),
                                ("prompt_mean", [0.1, 0.1]), ("seq_mean_token_sum_norm", [1 / 40, 1 / 40])]:
        weights = token_weights([1, 9], reduction, groups=[0, 0], max_len=20)
        np.testing.assert_allclose(weights, expected, rtol=1e-15)


def test_nothing_is_written_into_the_batch():
    rows, config = four_and_one(), settings("trainer.micro_batch_tokens=1000")
    batch = collate(*deal(rows, config, 0, 1)[0], "cpu")
    del batch["kl_weights"]
    before = {name: column.clone() for name, column in batch.items()}
    policy = Policy(language_model())
    values = []
    for _ in range(2):
        loss = policy(**batch, temperature=0.7, eps_clip_low=0.2, eps_clip_high=0.05)[0]
        loss.backward()
        values.append(loss.item())
        assert all(torch.equal(batch[name], column) for name, column in before.items())
    assert values[0] == values[1] == pytest.approx(1.4)
    untouched = four_and_one()
    update_twice = settings("trainer.update_epochs_per_batch=2", "optimizer.lr=0.1")
    updated(rows, update_twice)
    assert rows == untouched


# ---- masks and tokens ----

def test_nan_does_not_pass_through_the_mask():
    rows = [trial(0, [5, 6], [7, 8, 9], -1.0, mask=[1, 0, 1], logprobs=[-1.0, float("nan"), -1.0]),
            trial(1, [5, 6], [7, 8], float("nan"), mask=[0, 0], logprobs=[float("nan")] * 2)]
    metrics, gradients, weights = updated(rows, settings(
        "trainer.micro_batch_tokens=1000", "algorithm.use_tis=true", "algorithm.tis_imp_ratio_cap=1e-6"))
    assert metrics["loss/policy"] == pytest.approx(1e-6)  # both tokens: loss 1 times the cap; their mean
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(torch.isfinite(value).all() for value in [*gradients.values(), *weights.values()])


class Merging(Letters):
    """Reads "ab" as one id, 3, though the model may have written it with two."""

    def __call__(self, text, add_special_tokens):
        merged = text.replace("ab", chr(3))
        return SimpleNamespace(input_ids=[ord(letter) for letter in merged])

    def decode(self, ids, skip_special_tokens=False):
        return super().decode(ids).replace(chr(3), "ab")


def test_completions_are_not_tokenised_again():
    sampled, tokenizer = [ord("a"), ord("b"), 3, EOS], Merging()
    assert tokenizer(tokenizer.decode(sampled), False).input_ids == [3, 3]
    (found,), _ = trials_of([sampled], SimpleNamespace(id="t", instruction="x"), tokenizer)
    assert found.messages[-1]["content"] == "abab" and found.response_ids == sampled
    columns = collate([found], np.array([1.0]), np.array([0.0]), "cpu")
    assert columns["targets"].tolist() == sampled


def thinking_tokenizer():
    """Words and the marks of a chat; the template opens with BOS and closes thinking that is not wanted."""
    marks = ["<bos>", "<unk>", "<|end|>", "<|user|>", "<|assistant|>", "<think>", "</think>"]
    vocabulary = {word: i for i, word in enumerate([*marks, "\n\n", "add", *sorted(set(REQUEST.split()))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\n\n| "), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.add_special_tokens(marks)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<|end|>")
    fast.chat_template = ("<bos>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
                          "{% if add_generation_prompt %}<|assistant|>{% endif %}"
                          "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}")
    return fast


@pytest.mark.parametrize("enable_thinking, end", [
    ("false", ["<|end|>", "<|assistant|>", "<think>", "\n\n", "</think>", "\n\n"]),
    ("true", ["<|end|>", "<|assistant|>"]),
])
def test_chat_template_is_rendered_once_with_the_thinking_of_the_config(enable_thinking, end):
    tokenizer = thinking_tokenizer()
    trials, sampler = trials_of([[EOS], [EOS]], SimpleNamespace(id="t", instruction="add"), tokenizer,
                                config=settings(f"model.enable_thinking={enable_thinking}"))
    for found, request in zip(trials, sampler.requests, strict=True):
        words = tokenizer.convert_ids_to_tokens(found.prompt_ids)
        assert words[:4] == ["<bos>", "<|user|>", "add", "\n\n"] and words[-len(end):] == end
        assert words.count("<bos>") == words.count("<|user|>") == 1  # the tokenizer adds none
        assert request.prompt_ids == found.prompt_ids


# ---- sampling against scoring ----

@pytest.mark.parametrize("key", ["top_k", "top_p", "temperature"])
def test_what_cuts_or_shapes_the_distribution_has_no_default(tmp_path, key):
    content = json.loads((ROOT / "rl_config.json").read_text())
    del content["rollout"][key]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"rollout.{key}: missing, expected"):
        load_config(str(tmp_path / "config.json"))


def test_generation_config_of_the_hub_does_not_leak_into_sampling():
    model, asked = language_model(), [Request([5, 6, 7], (3, sample)) for sample in range(4)]
    expected = Sampler(model, (), settings().rollout).run(asked)
    assert len({completion.ids[0] for completion in expected}) > 1
    model.generation_config.update(do_sample=True, top_p=0.8, top_k=1, repetition_penalty=1.5,
                                   temperature=0.1)
    assert Sampler(model, (), settings().rollout).run(asked) == expected
    for completion in expected:  # and the logprobs are of the plain softmax at the temperature of the config
        with torch.no_grad():
            logits = model(torch.tensor([[5, 6, 7, *completion.ids]])).logits[0, 2:-1]
        plain = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, plain, rtol=0, atol=1e-12)


def test_sampler_and_trainer_agree_on_every_logprob():
    # float32: two summation orders through two layers; forgetting temperature 0.7 on one side costs over 0.1
    model, rows = language_model(torch.float32), []
    asked = [Request([5, 6, 7], (1, i)) for i in range(4)]
    completions = Sampler(model, {EOS}, settings().rollout).run(asked)
    for i, completion in enumerate(completions):
        rows.append(trial(i, [5, 6, 7], completion.ids, 1.0, logprobs=completion.logprobs))
    metrics, _, _ = updated(rows, settings("trainer.micro_batch_tokens=1000"), model=model)
    assert metrics["loss/trained_tokens"] == sum(len(completion.ids) for completion in completions) > 50
    assert 0 < metrics["rollout/logprob_gap"] < 2e-5


# ---- seeds and ranks ----

# a micro-batch is one row, and the first one goes to rank 0
TWO_RANK_UPDATES = {
    "no row for rank 1": lambda: [trial(0, [5, 6], [7, 8, 9], -1.0), trial(1, [5], [6], 0.0)],
    "flat groups alone": lambda: [trial(g, [5, 6], [7, 8, 9], 0.0) for g in range(4)],
}


def sampled(accelerator, eos_ids):
    """Three tasks of one and the same prompt: groups 0 and 2 are sampled by rank 0, group 1 by rank 1."""
    config, tasks = settings(), [SimpleNamespace(id=f"t{i}", instruction="add") for i in range(3)]
    sampler = Sampler(language_model(), eos_ids, config.rollout)
    return sample_step(tasks, 2, (7, 0, 1), "", accelerator, sampler, None, Letters(), config)


def work_of_a_rank(folder):
    """What each of two processes does; collectives that wait for a minute fail."""
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=60))])
    found = {name: updated(rows(), settings(), accelerator) for name, rows in TWO_RANK_UPDATES.items()}
    found["ids"] = [[row.response_ids for row in sampled(accelerator, ())] for _ in range(2)]
    # on rank 0 every id ends a reply, on rank 1 none does: 1 token against 64
    unequal = sampled(accelerator, range(VOCABULARY) if accelerator.is_main_process else ())
    found["unequal"] = rollout_metrics(unequal)
    torch.save(found, folder / f"rank{accelerator.process_index}.pt")
    accelerator.end_training()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What both ranks found: two processes joined by gloo, ended after 90 s whatever they do."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                           "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [subprocess.Popen([sys.executable, __file__, folder], stderr=subprocess.PIPE, text=True,
                                  env=common | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_RANK_UPDATES)
def test_ranks_without_rows_neither_hang_nor_part_from_the_others(two_ranks, name):
    metrics, gradients, weights = updated(TWO_RANK_UPDATES[name](), settings())
    assert (max(value.abs().max() for value in gradients.values()) > 1e-3) == (name != "flat groups alone")
    for found in two_ranks:
        assert_close(found[name][1], gradients)
        assert_close(found[name][2], weights)
        assert found[name][0] == pytest.approx(metrics, rel=1e-9, abs=1e-15)


@pytest.mark.slow
def test_one_prompt_gives_other_samples_on_other_ranks_and_the_same_ones_again(two_ranks):
    alone = [row.response_ids for row in sampled(Accelerator(cpu=True), ())]
    assert len({tuple(ids[:8]) for ids in alone}) == 6  # three groups of two, all of one prompt
    for found in two_ranks:
        assert found["ids"] == [alone, alone]


@pytest.mark.slow
def test_metrics_are_no_mean_of_rank_means(two_ranks):
    for found in two_ranks:  # four replies of 1 token on rank 0 and two of 64 on rank 1; not (1 + 64)/2
        assert found["unequal"]["rollout/length_mean"] == (4 * 1 + 2 * 64) / 6
        assert found["unequal"]["rollout/truncated"] == pytest.approx(2 / 6)  # not 1/2
        assert found["unequal"]["rollout/length_max"] == 64 and found["unequal"]["sandbox/error"] == 6
    assert two_ranks[0]["unequal"] == two_ranks[1]["unequal"]


class VocabularyRows(TorchDispatchMode):
    """Most rows that any result with V columns has."""
    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() > 1 and out.shape[-1] == 509:
            self.rows = max(self.rows, out.numel() // 509)
        return out


def test_logits_are_made_for_trained_tokens_alone():
    # two rows of 100 tokens, of which 40 are trained, and more than the 32 rows of the transposed head
    rows = [trial(g, [5] * 80, [7] * 20, 1.0) for g in range(2)]
    batch = collate(rows, np.ones(2), np.zeros(2), "cpu")
    policy = Policy(language_model(vocab_size=509))
    with VocabularyRows() as largest:
        policy(**batch, eps_clip_low=0.2, eps_clip_high=0.05)[0].backward()
    assert largest.rows == 40
    sampler = Sampler(policy.lm, (), settings("rollout.max_new_tokens=2").rollout)
    with VocabularyRows() as largest:
        sampler.run([Request([5] * 80, (0,))])
    assert largest.rows <= 32  # one logit row for the last of 80 prompt tokens


# ---- checkpoints ----

def test_resume_loses_neither_the_epoch_nor_the_place_in_it():
    tasks = list(range(12))  # 3 steps of 4 tasks are an epoch

    def steps(first, last):
        return [tasks_of_step(tasks, step, 4, seed=1) for step in range(first, last + 1)]

    whole = steps(1, 9)
    epochs = [sum(whole[first:first + 3], []) for first in (0, 3, 6)]
    assert all(sorted(epoch) == tasks for epoch in epochs)  # each task once
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]  # in another order each time
    np.random.seed(5)  # whatever a resumed process did before
    assert steps(6, 9) == whole[5:]
    # 13 tasks: one is left out of each epoch, and the next begins with step 4 all the same
    assert len({task for step in (4, 5, 6) for task in tasks_of_step(list(range(13)), step, 4, 1)}) == 12


def test_a_run_killed_while_it_saves_keeps_the_checkpoint_before(tmp_path, capsys, monkeypatch):
    accelerator, model = Accelerator(cpu=True), language_model()
    policy = distribute(Policy(model), accelerator, 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    states = policy, optimizer, accelerator
    save(tmp_path, 1, *states, keep=1)
    saved = [p.detach().clone() for p in model.parameters()]

    def die(_state, checkpoint_id, no_dist):
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(dcp, "save", die)
            save(tmp_path, 2, *states, keep=1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    half = tmp_path / "checkpoints" / ".writing_global_step_2"
    assert (half / "__0_0.distcp").read_bytes() == b"half"
    assert [step for step, _ in checkpoints(tmp_path)] == [1]

    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert resume(tmp_path, *states) == 1 and not half.exists() and str(half) in capsys.readouterr().out
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), saved, strict=True))
    save(tmp_path, 2, *states, keep=1)
    assert [step for step, _ in checkpoints(tmp_path)] == [2]


# ---- reward ----

MARK = f"a process of test_pains.py {os.getpid()}"


def task(name, tests=ADD_TESTS, reference=ADD):
    return SimpleNamespace(id=name, instruction="Write add.", files={
        "tests/test_solution.py": tests.encode(), "solution/solution.py": reference.encode()})


@pytest.fixture(scope="module")
def box():
    with Sandbox(workers=1, timeout_s=1.5, memory_mb=256) as made:
        made.grade(task("warm"), {"solution.py": ADD})
        yield made


def test_a_reward_that_hangs_or_hoards_is_zero_and_counted(box):
    replies = [[*map(ord, f"```python\n{code}\n```"), EOS]
               for code in ("while True: pass", "x = bytearray(10**10)", ADD)]
    box.grade(task("add"), {"solution.py": ADD})
    began = time.monotonic()
    trials, _ = trials_of(replies, task("add"), Letters(), box)
    assert 1.5 <= time.monotonic() - began < 4
    assert [(t.outcome, t.reward, t.excluded) for t in trials] == [
        ("timeout", 0.0, False), ("oom", 0.0, False), ("passed", 1.0, False)]
    set_advantages(trials, settings().algorithm)
    assert [t.advantage for t in trials] == pytest.approx([-1 / 2, -1 / 2, 1])  # they stay in the baseline
    metrics = rollout_metrics(trials)
    assert metrics["reward/mean"] == pytest.approx(1 / 3) and metrics["reward/mean_finished"] == 1.0
    assert metrics["sandbox/timeout"] == metrics["sandbox/oom"] == metrics["sandbox/passed"] == 1


def survivors():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path] * (MARK.encode() in path.read_bytes())
        except OSError:
            pass  # it has just ended
    return found


def spawned(then):
    """A child that outlives its parent and holds its output; `assert` shows that it runs."""
    return (f"import os, sys, time\nline = [sys.executable, '-c', 'import time; time.sleep(60)', {MARK!r}]\n"
            "child = os.posix_spawn(sys.executable, line, os.environ)\ntime.sleep(0.2)\n"
            f"assert os.waitpid(child, os.WNOHANG) == (0, 0)\n{then}\n{ADD}")


@pytest.mark.parametrize("then, outcome", [("", "passed"), ("print('out'); os._exit(0)", "error"),
                                           ("while True: pass", "timeout")])
def test_no_test_process_survives_and_none_is_waited_for(box, then, outcome):
    began = time.monotonic()
    verdict = box.grade(task("add"), {"solution.py": spawned(then)})
    assert time.monotonic() - began < 4 and survivors() == []
    assert verdict.outcome == outcome and "AssertionError" not in verdict.output, verdict


def test_reward_zero_is_a_reward_and_only_an_excluded_trial_lacks_one():
    rows = [trial(0, [5], [6], 9.0, reward=reward, excluded=reward is None)
            for reward in (0.0, 1.0, None, 0.0)]
    set_advantages(rows, settings().algorithm)
    # against the mean of the other two of 0, 1, 0; without the zeros there would be nothing to learn
    assert [row.advantage for row in rows] == [-0.5, 1.0, 0.0, -0.5]
    assert rloo_n([0.0, 1.0], [0, 0]).tolist() == [-1.0, 1.0]
    metrics = rollout_metrics(rows)
    assert metrics["reward/mean"] == pytest.approx(1 / 3)
    assert metrics["rollout/excluded"] == 1 / 4 and metrics["rollout/frac_zero_variance"] == 0


def test_a_right_prefix_does_not_pass(box):
    lines = task("lines", "from solution import lines\ndef test_lines():\n    assert lines() == ['1', '2']\n",
                 "def lines():\n    return ['1', '2']\n")
    for answer, outcome in ("['1', '2']", "passed"), ("['1']", "failed"), ("['1', '2', '3']", "failed"):
        assert box.grade(lines, {"solution.py": f"def lines():\n    return {answer}\n"}).outcome == outcome
    # nor do the first tests when the program ends before the others
    code = "import os\ndef add(a, b):\n    return a + b if a == 2 else os._exit(0)\n"
    verdict = box.grade(task("add"), {"solution.py": code})
    assert (verdict.outcome, verdict.reward, verdict.passed, verdict.total) == ("failed", 0.0, 1, 2)


# ---- metrics ----

def test_metrics_of_the_whole_step_by_hand():
    rows = [trial(0, [5], [6] * 3, 0.0, reward=1.0, outcome="passed", entropy=1.0),
            trial(0, [5], [6] * 8, 0.0, reward=0.5, truncated=True, entropy=2.0,
                  ending="OutputLengthExceededError"),
            trial(1, [5], [6], 0.0, reward=None, excluded=True, outcome="infra", entropy=4.0)]
    metrics = rollout_metrics(rows)
    assert metrics["rollout/length_mean"] == (3 + 8 + 1) / 3 and metrics["rollout/length_max"] == 8
    assert metrics["rollout/entropy"] == pytest.approx((3 * 1 + 8 * 2 + 1 * 4) / 12)  # a token's, not a row's
    assert (metrics["reward/mean"], metrics["reward/mean_finished"]) == (0.75, 1.0)
    assert metrics["reward/pass_at_n"] == 1 / 2 and metrics["rollout/truncated"] == pytest.approx(1 / 3)
    assert [metrics[f"sandbox/{name}"] for name in ("passed", "failed", "infra")] == [1, 1, 1]
    assert json.loads(json.dumps(metrics)) == metrics


def test_the_loss_is_not_that_of_the_last_micro_batch():
    rows = four_and_one()
    for row, sampled_logprob in zip(rows, (-1.0, -100.0)):
        row.logprobs = [sampled_logprob] * len(row.response_ids)
    one, many = (updated(rows, settings(f"trainer.micro_batch_tokens={budget}"))[0] for budget in (1000, 1))
    assert one["loss/policy"] == pytest.approx(1.4) and one["loss/trained_tokens"] == 5
    assert many == pytest.approx(one, rel=1e-9)  # row 1 has a gap of some 95 nats: a mean of means shows


if __name__ == "__main__":
    work_of_a_rank(Path(sys.argv[1]))
