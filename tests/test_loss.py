"""loss.py: token weights and token losses by hand, the fused kernel against the plain log-softmax graph."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import loss
from loss import REDUCTIONS, fused_policy_loss, kl_estimate, legacy_token_weights, policy_loss, token_weights

# rows of the reduction examples: name -> (trained tokens, loss of each token)
ROWS = {"A": (2, 1.0), "B": (8, 0.25), "D": (10, 0.1), "E": (0, 0.0)}
PPO = {"eps_clip_low": 0.2, "eps_clip_high": 0.05}
DUAL = PPO | {"clip_ratio_c": 3.0}


def total(rows, weights):
    """sum_i w_i sum_t l_it, every token of a row having the same loss."""
    return sum(weight * ROWS[row][0] * ROWS[row][1] for row, weight in zip(rows, weights, strict=True))


def reduced(rows, reduction, **arguments):
    return total(rows, token_weights([ROWS[row][0] for row in rows], reduction, **arguments))


def legacy(rows, micro_batch_of):
    return total(rows, legacy_token_weights([ROWS[row][0] for row in rows], micro_batch_of))


def test_reductions_of_two_rows():
    # sums of the rows: A 2 x 1 = 2, B 8 x 0.25 = 2
    assert reduced("AB", "token_mean") == pytest.approx(4 / 10)
    assert reduced("AB", "sequence_mean") == pytest.approx((1 + 0.25) / 2)
    assert reduced("AB", "seq_mean_token_sum_norm", max_len=10) == pytest.approx((2 / 10 + 2 / 10) / 2)
    assert reduced("AB", "prompt_mean", groups=[0, 0]) == pytest.approx(0.4)
    assert reduced("AB", "prompt_mean", groups=[0, 1]) == pytest.approx(0.625)


def test_legacy_token_mean_depends_on_the_split():
    assert legacy("AB", [0, 0]) == pytest.approx(0.4)
    assert legacy("AB", [0, 1]) == pytest.approx(0.625)
    assert legacy("ABE", [0, 0, 0]) == pytest.approx(0.4)
    assert legacy("ABD", [0, 0, 1]) == pytest.approx((0.4 + 0.1) / 2)
    assert legacy("ABD", [0, 0, 0]) == pytest.approx(5 / 20)


def test_legacy_with_one_row_a_micro_batch_is_the_sequence_mean_of_all_rows():
    lengths = [2, 8, 0, 10, 1]
    expected = token_weights(lengths, "sequence_mean", count_empty=True)
    np.testing.assert_allclose(legacy_token_weights(lengths, list("vwxyz")), expected, rtol=1e-15)


def test_reductions_with_an_empty_row():
    assert reduced("ABE", "token_mean") == pytest.approx(0.4)
    assert reduced("ABE", "prompt_mean", groups=[0, 0, 0]) == pytest.approx(0.4)
    assert reduced("ABE", "sequence_mean") == pytest.approx(0.625)
    assert reduced("ABE", "sequence_mean", count_empty=True) == pytest.approx(1.25 / 3)
    assert reduced("ABE", "seq_mean_token_sum_norm", max_len=10) == pytest.approx(0.2)
    assert reduced("ABE", "seq_mean_token_sum_norm", max_len=10, count_empty=True) == pytest.approx(0.4 / 3)


def test_an_empty_prompt_counts_only_when_asked():
    assert reduced("ABE", "prompt_mean", groups=[0, 0, 1]) == pytest.approx(0.4)
    assert reduced("ABE", "prompt_mean", groups=[0, 0, 1], count_empty=True) == pytest.approx(0.4 / 2)


def test_reductions_of_three_rows_over_the_whole_step():
    # the mean of micro-batch means would give 0.3625 and 0.15 for {A, B}, {D}
    assert reduced("ABD", "token_mean") == pytest.approx(5 / 20)
    assert reduced("ABD", "sequence_mean") == pytest.approx((1 + 0.25 + 0.1) / 3)
    assert reduced("ABD", "seq_mean_token_sum_norm", max_len=10) == pytest.approx(5 / 30)
    assert reduced("ABD", "prompt_mean", groups=["p1", "p1", "p2"]) == pytest.approx((4 / 10 + 1 / 10) / 2)


def test_a_token_mean_is_over_tokens_and_not_over_rows():
    # 4 tokens of loss 1 and one token of loss 3: 7/5, and not (1 + 3)/2
    assert token_weights([4, 1], "token_mean") @ [4 * 1.0, 3.0] == pytest.approx(1.4)


def test_share_of_a_short_and_a_long_row():
    lengths = np.array([10, 1000])
    np.testing.assert_allclose(lengths * token_weights(lengths, "token_mean"), [10 / 1010, 1000 / 1010])
    np.testing.assert_allclose(lengths * token_weights(lengths, "sequence_mean"), [0.5, 0.5])
    np.testing.assert_allclose(token_weights(lengths, "seq_mean_token_sum_norm", max_len=2000), [1 / 4000] * 2)


@pytest.mark.parametrize("reduction", [name for name in REDUCTIONS if name != "token_mean_legacy"])
@pytest.mark.parametrize("count_empty", [False, True])
def test_an_empty_row_has_weight_zero(reduction, count_empty):
    for lengths in ([0, 3, 0], [0, 0, 0]):
        weights = token_weights(lengths, reduction, groups=[0, 0, 1], max_len=4, count_empty=count_empty)
        assert weights.dtype == np.float64 and np.isfinite(weights).all()
        assert (weights > 0).tolist() == [length > 0 for length in lengths]
    assert token_weights([], reduction, groups=[], max_len=4, count_empty=count_empty).shape == (0,)


def test_wrong_arguments_raise():
    for arguments, text in [(("prompt_mean",), "needs the group"), (("seq_mean_token_sum_norm",), "found None"),
                            (("token_mean_legacy",), "legacy_token_weights"), (("mean",), "found 'mean'")]:
        with pytest.raises(ValueError, match=text):
            token_weights([1, 2], *arguments)


def one(value):
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize("advantage, delta, settings, expected", [
    (0.857143, 0.1, PPO, -0.9),  # ratio 1.10517, clipped at 1.05
    (0.857143, -0.3, PPO, -0.634987),  # ratio 0.74082 and no lower clip for a positive advantage
    (-0.285714, -0.3, PPO, 0.228571),  # ratio 0.74082, clipped at 0.8
    (-0.285714, 1.5, PPO, 1.280481),  # ratio 4.48169 and no upper clip for a negative advantage
    (-0.285714, 1.5, DUAL, 0.857142),  # 3 x 0.285714
    (0.857143, 1.5, DUAL, -0.9),  # the dual clip is for negative advantages alone
    (0.0, 1.5, DUAL, 0.0),
])
def test_policy_loss_by_hand(advantage, delta, settings, expected):
    found = policy_loss(one(-1.0 + delta), one(-1.0), one(advantage), **settings)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_gradient_of_the_policy_loss():
    # -A r where the ratio is inside the clip or the clip is against the update, 0 where it is clipped
    old = torch.full((5,), -1.0, dtype=torch.float64)
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    deltas = torch.tensor([0.01, 0.1, -0.3, 0.5, 1.5], dtype=torch.float64)
    logprobs = (old + deltas).requires_grad_()
    policy_loss(logprobs, old, advantages, **DUAL).sum().backward()
    e = np.exp
    np.testing.assert_allclose(logprobs.grad, [-2 * e(0.01), 0, 0, 2 * e(0.5), 0], rtol=1e-12)


def test_truncated_importance_sampling_by_hand():
    # exp(1) is cut to 2, exp(0.5) = 1.64872, exp(-1) = 0.36788; ratio 1 and A = -1 leave the loss at 1
    old = torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([-2.0, -1.5, -1.0], dtype=torch.float64)
    found = policy_loss(old.detach(), old, -torch.ones(3), rollout_logprobs=rollout, tis_cap=2.0, **PPO)
    np.testing.assert_allclose(found.detach(), [2, 1.6487212707, 0.3678794412], rtol=1e-9)
    found.sum().backward()  # d ratio / d old = -ratio, and nothing through the correction
    np.testing.assert_allclose(old.grad, [-2, -1.6487212707, -0.3678794412], rtol=1e-9)
    with pytest.raises(ValueError, match="needs rollout_logprobs"):
        policy_loss(old, old, torch.ones(3), tis_cap=2.0, **PPO)


def test_far_ratios_stay_finite():
    logprobs = torch.tensor([-1.0, -900.0], requires_grad=True)
    losses = policy_loss(logprobs, torch.tensor([-900.0, -1.0]), torch.tensor([-1.0, 1.0]), **PPO)
    losses.sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(logprobs.grad).all()


def test_kl_estimators_by_hand():
    # d = 0.2: 0.2, 0.04 / 2, exp(-0.2) + 0.2 - 1; slopes 1, d, 1 - exp(-d)
    for name, value, slope in [("k1", 0.2, 1), ("k2", 0.02, 0.2), ("k3", 0.0187307531, 0.1812692469)]:
        logprobs = one(-0.8).requires_grad_()
        found = kl_estimate(logprobs, one(-1.0), name)
        found.sum().backward()
        assert found.item() == pytest.approx(value, rel=1e-8) and logprobs.grad.item() == pytest.approx(slope, rel=1e-8)
    with pytest.raises(ValueError, match="found 'k4'"):
        kl_estimate(one(0.0), one(0.0), "k4")


T, H, V = 11, 3, 13


def inputs(dtype=torch.float64, tokens=T):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(V, (tokens,), generator=g)
    weights = torch.rand(tokens, generator=g, dtype=torch.float64)
    advantages = torch.randn(tokens, generator=g, dtype=torch.float64)
    return hidden, head, targets, weights, advantages


def plain(hidden, head, targets, weights, advantages, *, temperature=1.0, old_logprobs=None, ref_logprobs=None,
          kl_weights=None, kl_estimator="k3", **settings):
    """The same objective with all logits at once and autograd alone."""
    distribution = torch.log_softmax(hidden @ head.T / temperature, -1)
    logprobs = distribution[torch.arange(len(targets)), targets]
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    loss = (weights * policy_loss(logprobs, old, advantages, **settings)).sum()
    if ref_logprobs is not None:
        loss = loss + (kl_weights * kl_estimate(logprobs, ref_logprobs, kl_estimator)).sum()
    return loss, logprobs.detach(), -(distribution.exp() * distribution).sum(-1).detach()


def shifted(seed, spread=0.3):
    """Logprobs near those of the policy, so that some ratios are clipped and some are not."""
    hidden, head, targets, *rest = inputs()
    near = plain(hidden, head, targets, *rest, **PPO)[1]
    return near + spread * torch.randn(T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES = {
    "on policy": lambda: PPO,
    "temperature": lambda: PPO | {"temperature": 0.7},
    "old logprobs": lambda: PPO | {"old_logprobs": shifted(1), "temperature": 0.7},
    "dual clip": lambda: DUAL | {"old_logprobs": shifted(2, 2.0)},
    "tis": lambda: PPO | {"old_logprobs": shifted(1), "rollout_logprobs": shifted(4), "tis_cap": 1.1},
    "tis on policy": lambda: PPO | {"rollout_logprobs": shifted(4), "tis_cap": 1.1, "temperature": 0.7},
    "kl": lambda: PPO | {"ref_logprobs": shifted(5), "kl_weights": torch.linspace(0, 1, T, dtype=torch.float64)},
    "all": lambda: DUAL | {"temperature": 0.7, "old_logprobs": shifted(1, 1.0), "rollout_logprobs": shifted(4),
                           "tis_cap": 1.1, "ref_logprobs": shifted(5), "kl_estimator": "k2",
                           "kl_weights": torch.linspace(0, 1, T, dtype=torch.float64)},
}


@pytest.mark.parametrize("chunk", [1, 3, 7, T, 512])
@pytest.mark.parametrize("case", CASES)
def test_fused_equals_plain(case, chunk):
    settings = CASES[case]()
    expected_inputs, found_inputs = inputs(), inputs()
    expected, found = plain(*expected_inputs, **settings), fused_policy_loss(*found_inputs, chunk=chunk, **settings)
    (3.5 * expected[0]).backward()  # a scaled loss scales the gradients
    (3.5 * found[0]).backward()
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-13)
    assert not found[1].requires_grad and not found[2].requires_grad
    for a, b in zip(expected_inputs[:2], found_inputs[:2], strict=True):
        assert a.grad.abs().max() > 0.01
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-13)


def test_fused_gradcheck():
    _, _, targets, weights, advantages = inputs()
    settings = CASES["all"]()
    assert torch.autograd.gradcheck(
        lambda hidden, head: fused_policy_loss(hidden, head, targets, weights, advantages, chunk=4, **settings)[0],
        inputs()[:2])


@pytest.mark.parametrize("frozen", [0, 1])
def test_fused_gradient_to_one_side_alone(frozen):
    expected_inputs, found_inputs = inputs(), inputs()
    found_inputs[frozen].requires_grad_(False)
    plain(*expected_inputs, **PPO)[0].backward()
    fused_policy_loss(*found_inputs, chunk=3, **PPO)[0].backward()
    assert found_inputs[frozen].grad is None
    torch.testing.assert_close(found_inputs[1 - frozen].grad, expected_inputs[1 - frozen].grad, rtol=1e-12, atol=1e-13)


def test_fused_without_tokens():
    arguments = inputs(tokens=0)
    loss, logprobs, entropies = fused_policy_loss(*arguments, **PPO)
    loss.backward()
    assert loss.item() == 0.0 and logprobs.shape == entropies.shape == (0,)
    assert arguments[0].grad.shape == (0, H) and (arguments[1].grad == 0).all() and arguments[1].grad.shape == (V, H)


def test_fused_with_tied_weights():
    grads = []
    for objective in (plain, fused_policy_loss):
        _, embedding, targets, weights, advantages = inputs()
        hidden = torch.tanh(embedding[(targets + 1) % V])  # the head is the embedding too: two paths into one tensor
        objective(hidden, embedding, targets, weights, advantages, **PPO)[0].backward()
        grads.append(embedding.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_fused_in_bfloat16(head_dtype):
    found_inputs = inputs(torch.bfloat16)
    rounded_head = found_inputs[1].detach().to(head_dtype).requires_grad_()
    loss, logprobs, _ = fused_policy_loss(found_inputs[0], rounded_head, *found_inputs[2:], chunk=4, **PPO)
    loss.backward()
    assert loss.dtype == logprobs.dtype == torch.float32
    assert found_inputs[0].grad.dtype == torch.bfloat16 and rounded_head.grad.dtype == head_dtype
    hidden, head = (x.detach().double().requires_grad_() for x in (found_inputs[0], rounded_head))
    expected, expected_logprobs, _ = plain(hidden, head, *found_inputs[2:], **PPO)
    expected.backward()
    # bfloat16 has 8 bits: logits up to 8 are off by up to 0.016, and gradients by a few such steps
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=0, atol=0.06)
    for grad, exact in ((found_inputs[0].grad, hidden.grad), (rounded_head.grad, head.grad)):
        assert (grad.double() - exact).norm() < 0.03 * exact.norm()


def test_fused_without_gradients_makes_none():
    hidden, head, *rest = inputs()
    expected = fused_policy_loss(hidden, head, *rest, chunk=4, **PPO)
    with torch.no_grad(), LargestVocabularyTensor() as largest:
        found = fused_policy_loss(hidden.detach(), head, *rest, chunk=4, **PPO)
    assert largest.head_gradients == 0 and not found[0].requires_grad
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


class LargestVocabularyTensor(TorchDispatchMode):
    """Rows of the largest tensor with V columns that any operation returns, and how many are made for the head."""
    rows = head_gradients = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2:
            self.rows = max(self.rows, out.shape[0] * (out.shape[1] == V))
            self.head_gradients += out.shape == (V, H) and func != torch.ops.aten.detach.default
        return out


@pytest.mark.parametrize("part", [1, 4, 1000])
def test_the_head_gradient_is_whole_whatever_its_parts(monkeypatch, part):
    monkeypatch.setattr(loss, "VOCABULARY_PART", part)
    expected_inputs, found_inputs = inputs(), inputs()
    plain(*expected_inputs, **PPO)[0].backward()
    fused_policy_loss(*found_inputs, chunk=3, **PPO)[0].backward()
    torch.testing.assert_close(found_inputs[1].grad, expected_inputs[1].grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk", [3, 4])
def test_fused_never_holds_all_logits(chunk):
    hidden, head, targets, weights, advantages = inputs()
    with LargestVocabularyTensor() as largest:
        fused_policy_loss(hidden, head, targets, weights, advantages, chunk=chunk, **PPO)[0].backward()
    assert largest.rows == chunk  # the transposed head (H, V) has V columns too, but no more than 3 rows
    with LargestVocabularyTensor() as largest:
        plain(hidden, head, targets, weights, advantages, **PPO)[0].backward()
    assert largest.rows == T
