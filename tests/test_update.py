"""update.py: one optimizer step against the plain padded graph in float64, and how rows are split and dealt."""

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from agent import Trial
from config import load_config
from update import Policy, collate, deal, distribute, split, update

BASE = str(Path(__file__).resolve().parent.parent / "rl_config.json")
VOCABULARY, EOS = 23, 2
TEMPERATURE = 0.7
REDUCTIONS = ["token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm"]


def in_float64(forward):
    """A norm that stays in float64; the library's goes through float32, whose rounding is no sum of its parts."""
    def norm(self, x):
        if x.dtype != torch.float64:
            return forward(self, x)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)
    return norm


for norm in (LlamaRMSNorm, Qwen3RMSNorm):
    norm.forward = in_float64(norm.forward)


def settings(*overrides):
    return load_config(BASE, [
        "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4", "rollout.max_new_tokens=16",
        "rollout.max_model_len=40", "trainer.micro_batch_tokens=25", "optimizer.lr=1", "optimizer.max_grad_norm=1e9",
        f"rollout.temperature={TEMPERATURE}", *overrides])


def language_model(kind="qwen3", seed=0, **more):
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "eos_token_id": EOS, "pad_token_id": EOS, **more}
    if kind == "gpt2":
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                            **sizes)
        return GPT2LMHeadModel(config).double()
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "initializer_range": 0.3}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).double()
    return Qwen3ForCausalLM(Qwen3Config(head_dim=8, tie_word_embeddings=True, **sizes)).double()


def trial(group, prompt, response, advantage, mask=None, logprobs=None):
    return Trial(task=f"t{group}", group=group, sample=0, seed=(0,), messages=[], prompt_ids=prompt,
                 response_ids=response, loss_mask=[1] * len(response) if mask is None else mask,
                 logprobs=[-1.0] * len(response) if logprobs is None else logprobs, reward=0.0, outcome="failed",
                 ending="", excluded=False, truncated=False, advantage=advantage)


def batch():
    """Unequal lengths, a row with gaps in its mask, an empty one, an excluded one and one without advantage."""
    return [
        trial(0, [5, 6, 7], [8, 9, EOS], 0.7),
        trial(0, [5, 6, 7], [10, 11, 12, 13, 14, 15, 16, EOS], -0.25),
        trial(1, [4], [17], 0.5),
        trial(1, [4], [18, 19, 20, 21, EOS], -0.5, mask=[1, 1, 0, 0, 1]),
        trial(2, [3, 3], [9, 9, 9], -0.8, mask=[0, 0, 0]),
        trial(2, [3, 3], [10, EOS], 0.0),
        trial(3, [7] * 9, [6, 5, 4, EOS], 1.25),
        trial(3, [7] * 9, [22], 0.0, mask=[0]),
    ]


def weights_by_hand(rows, reduction, count_empty, max_len=40):
    n = np.array([sum(row.loss_mask) for row in rows])
    groups = np.array([row.group for row in rows])
    counted = len(rows) if count_empty else (n > 0).sum()
    tokens = np.array([n[groups == group].sum() for group in groups])
    prompts = len(set(groups if count_empty else groups[n > 0]))
    return {"token_mean": np.full(len(n), 1 / n.sum()), "sequence_mean": 1 / (counted * np.maximum(n, 1)),
            "prompt_mean": 1 / (prompts * np.maximum(tokens, 1)),
            "seq_mean_token_sum_norm": np.full(len(n), 1 / (counted * max_len))}[reduction]


def all_logprobs(model, rows):
    """All rows in one right-padded batch -> for each row the logprobs of its whole response."""
    ids = [torch.tensor(row.prompt_ids + row.response_ids) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=EOS)
    attention_mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    logprobs = (model(input_ids=padded, attention_mask=attention_mask).logits / TEMPERATURE).log_softmax(-1)
    found = []
    for i, row in enumerate(rows):
        p = len(row.prompt_ids)
        picked = logprobs[i, p - 1:p - 1 + len(row.response_ids)]
        found.append(picked.gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0])
    return found


def plain_loss(model, rows, weights, old=None, low=0.2, high=0.05):
    """sum_i w_i sum_t m_it l_it with the clipped surrogate, `old` None meaning the present logprobs."""
    total = 0.0
    for i, logprobs in enumerate(all_logprobs(model, rows)):
        ratio = torch.exp(logprobs - (logprobs.detach() if old is None else old[i]))
        a = rows[i].advantage
        surrogate = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
        total = total - weights[i] * (surrogate * torch.tensor(rows[i].loss_mask)).sum()
    return total


def prepared(model, optimizer=torch.optim.SGD):
    accelerator = Accelerator(cpu=True)
    policy = distribute(Policy(model), accelerator, 1)
    return accelerator, policy, optimizer(policy.parameters(), lr=1.0)


def gradients_of_update(model, rows, config, reference=None):
    accelerator, policy, optimizer = prepared(model)
    metrics = update(policy, reference, optimizer, accelerator, rows, 1, config)
    return {name: p.grad for name, p in model.named_parameters()}, metrics


def gradients_of(loss, model):
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal_gradients(found, expected):
    """Every gradient within 1e-12 of the largest element of the expected one."""
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-12 * max(1e-3, grad.abs().max().item()))
    assert max(grad.abs().max() for grad in expected.values()) > 1e-3


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("budget, count_empty", [(1, True), (25, False), (1000, True)])
def test_gradient_of_a_step_equals_the_plain_one(reduction, budget, count_empty):
    rows = batch()
    config = settings(f"algorithm.loss_reduction={reduction}", f"trainer.micro_batch_tokens={budget}",
                      f"algorithm.count_empty_rows={str(count_empty).lower()}")
    found, metrics = gradients_of_update(language_model(), rows, config)
    model, weights = language_model(), weights_by_hand(rows, reduction, count_empty)
    loss = plain_loss(model, rows, weights)
    assert_equal_gradients(found, gradients_of(loss, model))
    assert metrics["loss/policy"] == pytest.approx(loss.item(), rel=1e-12)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert metrics["loss/grad_norm"] == pytest.approx(norm.item(), rel=1e-9)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradient_of_other_architectures(kind):
    rows, model = batch(), language_model(kind)
    found, _ = gradients_of_update(language_model(kind), rows, settings())
    expected = gradients_of(plain_loss(model, rows, weights_by_hand(rows, "sequence_mean", True)), model)
    assert_equal_gradients(found, expected)


def test_gradient_with_checkpointed_activations():
    rows, model, checkpointed = batch(), language_model(), language_model()
    checkpointed.activation_checkpointing_enable()
    found, _ = gradients_of_update(checkpointed, rows, settings())
    expected = gradients_of(plain_loss(model, rows, weights_by_hand(rows, "sequence_mean", True)), model)
    assert_equal_gradients(found, expected)


def test_legacy_token_mean_changes_with_the_split():
    rows, found = batch(), {}
    for budget in (1, 25, 1000):
        config = settings("algorithm.loss_reduction=token_mean_legacy", f"trainer.micro_batch_tokens={budget}")
        found[budget], _ = gradients_of_update(language_model(), rows, config)
    model = language_model()
    one_row_each = gradients_of(plain_loss(model, rows, weights_by_hand(rows, "sequence_mean", True)), model)
    assert_equal_gradients(found[1], one_row_each)
    model = language_model()
    all_in_one = gradients_of(plain_loss(model, rows, weights_by_hand(rows, "token_mean", True)), model)
    assert_equal_gradients(found[1000], all_in_one)
    # 25 tokens: {6, 7}, {1, 0}, {4, 5, 3, 2}, as in the next test; tokens 4, 8 + 3, 2 + 3 + 1
    weights = [1 / 33, 1 / 33, 1 / 18, 1 / 18, 0, 1 / 18, 1 / 12, 0]
    model = language_model()
    assert_equal_gradients(found[25], gradients_of(plain_loss(model, rows, weights), model))


def test_split_repeats_few_prompts_and_pads_little():
    rows = batch()  # prompts 3 3 1 1 2 2 9 9, responses 3 8 1 5 3 2 4 1
    # prompts + responses, by prompt: 9 + 2 * 4, 3 + 2 * 8, 2 * 2 + 4 * 5: 60 tokens
    # by length [[1, 3], [6], [0, 4, 5, 2], [7]] 2 * 3 + 2 * 8, 9 + 4, 3 * 3 + 4 * 3, 9 + 1: 66 tokens
    assert split(range(8), rows, 25) == [[6, 7], [1, 0], [4, 5, 3, 2]]
    assert split(range(8), rows, 24) == [[6, 7], [1, 0], [4, 5, 3, 2]]
    assert split(range(8), rows, 23) == [[6, 7], [1, 0], [4, 5, 3], [2]]
    assert split(range(8), rows, 4 * 9 + 8 * 8) == [[6, 7, 1, 0, 4, 5, 3, 2]]
    assert sorted(split(range(8), rows, 1)) == [[i] for i in range(8)]  # a row may exceed the budget alone
    assert split([], rows, 25) == []
    short = [trial(0, [4], [9] * n, 1.0) for n in (1, 9)] + [trial(1, [5], [9] * n, 1.0) for n in (1, 9)]
    assert split(range(4), short, 20) == [[1, 3], [0, 2]]  # by length 2 + 18, 2 + 2; by prompt 2 * (1 + 18)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "token_mean_legacy"])
@pytest.mark.parametrize("silent", [False, True])
def test_deal_gives_each_row_to_one_rank(world, reduction, silent):
    rows = batch()
    for row in rows:
        row.advantage *= not silent
    config = settings(f"algorithm.loss_reduction={reduction}")
    ranks = [deal(rows, config, rank, world) for rank in range(world)]
    assert len({len(micro_batches) for micro_batches in ranks}) == 1 and len(ranks[0]) >= 1
    dealt = [row for rank in ranks for members, _, _ in rank for row in members]
    legacy = reduction == "token_mean_legacy"
    expected = [row for row in rows if legacy or row.advantage != 0 and sum(row.loss_mask)]
    assert sorted(map(id, dealt)) == sorted(map(id, expected))
    if not legacy:
        weight_of = {id(row): w for row, w in zip(rows, weights_by_hand(rows, reduction, True), strict=True)}
        for members, weights, kl_weights in (micro_batch for rank in ranks for micro_batch in rank):
            np.testing.assert_allclose(weights, [weight_of[id(row)] for row in members])
            assert len(kl_weights) == len(members) and not kl_weights.any()


def test_micro_batches_of_all_ranks_add_up_to_the_gradient():
    rows, model, config = batch(), language_model(), settings("algorithm.loss_reduction=token_mean")
    policy = Policy(model)
    for rank in range(3):
        for micro_batch in deal(rows, config, rank, 3):
            columns = collate(*micro_batch, "cpu")
            del columns["kl_weights"]
            policy(**columns, temperature=TEMPERATURE, eps_clip_low=0.2, eps_clip_high=0.05)[0].backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model = language_model()
    loss = plain_loss(model, rows, weights_by_hand(rows, "token_mean", True))
    assert_equal_gradients(found, gradients_of(loss, model))


def test_prompt_of_one_and_response_of_one_is_one_label():
    columns = collate([trial(0, [4], [17], 0.5, logprobs=[-3.0])], np.array([0.25]), np.array([0.0]), "cpu")
    assert columns["prompt_ids"].tolist() == [[4]] and columns["targets"].tolist() == [17]
    assert columns["positions"].tolist() == [[0], [0]]  # the hidden state of the prompt's only token predicts it
    assert [columns[x].tolist() for x in ("weights", "advantages", "rollout_logprobs")] == [[0.25], [0.5], [-3.0]]


def test_the_first_trained_label_follows_the_prompt_and_the_eos_is_one_though_it_pads():
    rows = [trial(0, [5, 6, 7], [8, EOS], 1.0), trial(0, [EOS, EOS], [9, 9, 9, 9], 1.0, mask=[1, 0, 0, 1])]
    columns = collate(rows, np.array([0.1, 0.2]), np.zeros(2), "cpu")
    assert columns["targets"].tolist() == [8, EOS, 9, 9]
    assert columns["positions"].tolist() == [[0, 0, 1, 1], [0, 1, 0, 3]]
    assert columns["prompt_ids"].tolist() == [[5, 6, 7], [0, EOS, EOS]] and columns["prompt_of"].tolist() == [0, 1]
    assert columns["prompt_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert columns["response_ids"].tolist() == [[8, EOS, 0], [9, 9, 9]]
    assert columns["response_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_a_prompt_is_forwarded_once_for_its_responses(monkeypatch):
    rows, policy, seen = batch(), Policy(language_model()), []
    forward = policy.lm.base_model.forward
    monkeypatch.setattr(policy.lm.base_model, "forward",
                        lambda input_ids, **more: seen.append(tuple(input_ids.shape)) or forward(input_ids, **more))
    columns = collate(rows, np.ones(8), np.zeros(8), "cpu")
    del columns["kl_weights"]
    policy(**columns, eps_clip_low=0.2, eps_clip_high=0.2)
    policy.lm.activation_checkpointing_enable()
    policy(**columns, eps_clip_low=0.2, eps_clip_high=0.2)
    assert seen == [(4, 9), (8, 7), (8, 16)]


@pytest.mark.parametrize("rows", [[], [trial(0, [5], [6, 7], 0.0)], [trial(0, [5], [6, 7], 0.5, mask=[0, 0])]])
@pytest.mark.parametrize("reduction", ["sequence_mean", "token_mean_legacy"])
def test_a_step_without_signal_is_a_step_of_zero_gradients(rows, reduction):
    model = language_model()
    before = [p.detach().clone() for p in model.parameters()]
    accelerator, policy, optimizer = prepared(model, torch.optim.AdamW)
    config = settings("optimizer.lr=0.1", "optimizer.weight_decay=0.5", f"algorithm.loss_reduction={reduction}")
    metrics = update(policy, None, optimizer, accelerator, rows, 1, config)
    assert metrics["loss/policy"] == metrics["loss/grad_norm"] == metrics["loss/clip_fraction"] == 0.0
    assert all(np.isfinite(value) for value in metrics.values())
    for p, was in zip(model.parameters(), before, strict=True):
        assert (p.grad == 0).all() and optimizer.state[p]["step"] == 1
        torch.testing.assert_close(p.detach(), was * (1 - 0.1 * 0.5), rtol=1e-14, atol=0)


@pytest.mark.parametrize("mini_batches, epochs", [(2, 2), (2, 1), (1, 2)])
def test_mini_batches_and_epochs_keep_the_old_logprobs_of_the_start(mini_batches, epochs):
    rows, model, lr = batch(), language_model(), 0.2
    config = settings(f"trainer.policy_mini_batch_size={4 // mini_batches}", f"optimizer.lr={lr}",
                      f"trainer.update_epochs_per_batch={epochs}")
    accelerator, policy, optimizer = prepared(model)
    metrics = update(policy, None, optimizer, accelerator, rows, 1, config)

    expected, clipped = language_model(), 0
    old = [logprobs.detach() for logprobs in all_logprobs(expected, rows)]
    for _ in range(epochs):
        for members in np.split(np.arange(8), mini_batches):  # two: groups 0 and 1, then 2 and 3
            part = [rows[i] for i in members]
            expected.zero_grad()
            weights = weights_by_hand(part, "sequence_mean", True)
            plain_loss(expected, part, weights, [old[i] for i in members]).backward()
            for i, logprobs in zip(members, all_logprobs(expected, part), strict=True):
                ratio, a = torch.exp(logprobs - old[i]), rows[i].advantage
                outside = ratio > 1.05 if a > 0 else ratio < 0.8 if a < 0 else ratio < 0
                clipped += (outside & (torch.tensor(rows[i].loss_mask) == 1)).sum().item()
            with torch.no_grad():
                for p in expected.parameters():
                    p -= lr * p.grad
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
    # trained tokens of an epoch: the rows with signal, 3 + 8 + 1 + 3 + 4
    assert metrics["loss/trained_tokens"] == 19 and clipped > 0
    assert metrics["loss/clip_fraction"] == pytest.approx(clipped / (19 * epochs))


def test_kl_and_truncated_importance_sampling():
    rows, model, frozen = batch(), language_model(), language_model(seed=9)
    rows[0].logprobs, rows[6].logprobs = [-1.5, -9.0, -2.5], [-30.0, -0.5, -3.0, -0.1]
    config = settings("algorithm.kl_loss_coef=0.3", "algorithm.kl_estimator_type=k2", "algorithm.use_tis=true",
                      "algorithm.tis_imp_ratio_cap=1.5", "algorithm.loss_reduction=token_mean")
    reference = Policy(frozen).requires_grad_(False).eval()
    found, metrics = gradients_of_update(language_model(), rows, config, reference)
    weights, kl_weights = (weights_by_hand(rows, name, True) for name in ("token_mean", "sequence_mean"))
    total, gap = 0.0, 0.0
    for i, (logprobs, ref) in enumerate(zip(all_logprobs(model, rows), all_logprobs(frozen, rows), strict=True)):
        mask, sampled = torch.tensor(rows[i].loss_mask), torch.tensor(rows[i].logprobs, dtype=torch.float64)
        correction = torch.exp(logprobs.detach() - sampled).clamp(max=1.5)
        surrogate = -rows[i].advantage * torch.exp(logprobs - logprobs.detach()) * correction
        kl = (logprobs - ref.detach()) ** 2 / 2
        total = total + (mask * (weights[i] * surrogate + 0.3 * kl_weights[i] * kl)).sum()
        gap += (mask * (logprobs.detach() - sampled).abs()).sum().item()
    assert_equal_gradients(found, gradients_of(total, model))
    assert metrics["loss/policy"] == pytest.approx(total.item(), rel=1e-12)
    # with KL the row without advantage is forwarded too: 3 + 8 + 1 + 3 + 2 + 4 tokens
    assert metrics["loss/trained_tokens"] == 21 and metrics["rollout/logprob_gap"] == pytest.approx(gap / 21)


def test_gradient_clip_and_warm_up_of_the_learning_rate():
    model = language_model()
    before = [p.detach().clone() for p in model.parameters()]
    accelerator, policy, optimizer = prepared(model)
    config = settings("optimizer.max_grad_norm=0.01", "optimizer.warmup_steps=4", "optimizer.lr=8")
    metrics = update(policy, None, optimizer, accelerator, batch(), 2, config)
    moved = torch.stack([(p.detach() - was).norm() for p, was in zip(model.parameters(), before, strict=True)]).norm()
    assert metrics["loss/lr"] == 8 * 2 / 4 and metrics["loss/grad_norm"] > 0.01  # the norm before the clip
    assert moved.item() == pytest.approx(4 * 0.01, rel=1e-3)


def test_a_gradient_that_is_not_finite_changes_nothing():
    model, rows = language_model(), batch()
    before = [p.detach().clone() for p in model.parameters()]
    accelerator, policy, optimizer = prepared(model)
    rows[0].advantage = float("inf")
    update(policy, None, optimizer, accelerator, rows, 1, settings())
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert not model.training
