"""The policy objective: token weights of each reduction, the clipped loss of a token, and a fused kernel for both.

    loss = sum_i sum_t w_i * l_it

`token_weights` makes w once per optimizer step from the lengths of ALL its rows on all ranks, so micro-batches and
ranks only add. What tells sequence-mean from token-mean is one branch of that function. `policy_loss` is l.
`fused_policy_loss` goes from hidden states to the loss without ever holding the logits of all tokens.

Shapes: N rows (trials), T trained tokens, H hidden size, V vocabulary.
Leaves out: an entropy bonus, sequence-level ratios (GSPO), value functions.
"""

import numpy as np
import torch

REDUCTIONS = ("token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm", "token_mean_legacy")
MAX_LOG_RATIO = 20.0  # exp(20) is far beyond every clip range and cap, and is finite in every float type used
VOCABULARY_PART = 8192  # rows of the head whose gradient is added at a time, so that no second (V, H) is alive


def token_weights(lengths, reduction, *, groups=None, max_len=None, count_empty=False) -> np.ndarray:
    """Weight of ONE trained token of row i, float64 (N,); 0 for a row without trained tokens.

    lengths  (N,) trained tokens of each row of the optimizer step
    groups   (N,) prompt of each row, needed by prompt_mean
    max_len  tokens a response may have, needed by seq_mean_token_sum_norm

    token_mean               1 / sum_j n_j                every token the same (DAPO, Yu et al. 2025)
    sequence_mean            1 / (N n_i)                  every response the same (GRPO, Shao et al. 2024)
    prompt_mean              1 / (P n_prompt(i))          every prompt the same, its tokens pooled
    seq_mean_token_sum_norm  1 / (N max_len)              sum of tokens over a constant (Dr. GRPO, Liu et al. 2025)

    N and P count rows and prompts with n_i > 0; with `count_empty` all of them, as the published run did, where an
    empty row (a failed trial) dilutes the mean. `token_mean_legacy` is no function of the lengths alone: call
    `legacy_token_weights` with the micro-batches.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    counted = np.ones(len(lengths), dtype=bool) if count_empty else lengths > 0
    if reduction == "token_mean":
        weights = np.full(len(lengths), 1 / max(lengths.sum(), 1))
    elif reduction == "sequence_mean":
        weights = 1 / (max(counted.sum(), 1) * np.maximum(lengths, 1))
    elif reduction == "prompt_mean":
        if groups is None:
            raise ValueError("prompt_mean needs the group of each row")
        _, group_of = np.unique(np.asarray(groups), return_inverse=True)
        tokens = np.bincount(group_of, weights=lengths)
        prompts = len(np.unique(group_of[counted]))
        weights = 1 / (max(prompts, 1) * np.maximum(tokens[group_of], 1))
    elif reduction == "seq_mean_token_sum_norm":
        if max_len is None or max_len < 1:
            raise ValueError(f"seq_mean_token_sum_norm needs the longest response in tokens, found {max_len}")
        weights = np.full(len(lengths), 1 / (max(counted.sum(), 1) * max_len))
    elif reduction == "token_mean_legacy":
        raise ValueError("token_mean_legacy depends on the micro-batches: use legacy_token_weights")
    else:
        raise ValueError(f"loss_reduction: expected one of {', '.join(REDUCTIONS)}, found {reduction!r}")
    return np.where(lengths > 0, weights, 0.0)


def legacy_token_weights(lengths, micro_batch_of) -> np.ndarray:
    """`token_mean` as the published code computed it: the mean over micro-batches of each one's own token mean.

    micro_batch_of (N,) labels the micro-batch of each row. The weight depends on the split; with one row to a
    micro-batch it is sequence_mean with every row counted, which is why the published arms could not differ.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    _, micro_batch = np.unique(np.asarray(micro_batch_of), return_inverse=True)
    tokens = np.bincount(micro_batch, weights=lengths)
    weights = 1 / (len(tokens) * np.maximum(tokens[micro_batch], 1)) if len(lengths) else lengths
    return np.where(lengths > 0, weights, 0.0)


def policy_loss(logprobs, old_logprobs, advantages, *, eps_clip_low, eps_clip_high, clip_ratio_c=None,
                rollout_logprobs=None, tis_cap=None) -> torch.Tensor:
    """Loss of each token, same shape as `logprobs`: the clipped surrogate of PPO (Schulman et al. 2017).

    ratio = exp(logprobs - old_logprobs);  l = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)
    clip_ratio_c c > 1: dual clip, l <= -c A where A < 0 (Ye et al. 2020).
    tis_cap: l is multiplied by min(exp(old - rollout), cap), a constant that corrects for a sampler whose
    probabilities differ from the trainer's (truncated importance sampling, Yao et al. 2025).
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped = ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if clip_ratio_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -clip_ratio_c * advantages), loss)
    if tis_cap is not None:
        if rollout_logprobs is None:
            raise ValueError("tis_cap needs rollout_logprobs")
        correction = (old_logprobs - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=tis_cap)
        loss = loss * correction.detach()
    return loss


def kl_estimate(logprobs, ref_logprobs, estimator) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy, differentiable (Schulman 2020).

    With d = logprobs - ref_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        return torch.exp((-d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + d - 1
    raise ValueError(f"kl_estimator_type: expected k1, k2 or k3, found {estimator!r}")


def fused_policy_loss(hidden, head, targets, weights, advantages, *, temperature=1.0, chunk=512, old_logprobs=None,
                      rollout_logprobs=None, eps_clip_low, eps_clip_high, clip_ratio_c=None, tis_cap=None,
                      ref_logprobs=None, kl_weights=None, kl_estimator="k3"):
    """Policy loss of T tokens straight from the hidden states that predict them.

    hidden (T, H), head (V, H), targets (T,) sampled ids, weights (T,) and advantages (T,) -> (loss, logprobs,
    entropies): a scalar with gradients to `hidden` and `head`, and two detached (T,) tensors of the policy
    softmax(hidden @ head.T / temperature). `old_logprobs` None means the present ones, detached (ratio 1).
    With `ref_logprobs` (T,), sum_t kl_weights_t * kl_t is added to the loss.

    The loss of a token depends on its own logprob alone, so each chunk's gradient is formed while its logits exist:
    at most (chunk, V) logits are alive, and nothing is computed twice.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)

    def objective(rows, logprobs):
        old = logprobs.detach() if old_logprobs is None else old_logprobs[rows]
        rollout = None if rollout_logprobs is None else rollout_logprobs[rows]
        losses = policy_loss(logprobs, old, advantages[rows].to(dtype), eps_clip_low=eps_clip_low,
                             eps_clip_high=eps_clip_high, clip_ratio_c=clip_ratio_c, rollout_logprobs=rollout,
                             tis_cap=tis_cap)
        total = (weights[rows].to(dtype) * losses).sum()
        if ref_logprobs is not None:
            kl = kl_estimate(logprobs, ref_logprobs[rows], kl_estimator)
            total = total + (kl_weights[rows].to(dtype) * kl).sum()
        return total

    if not torch.is_grad_enabled():
        head = head.detach()  # a Function is told that a parameter needs its gradient even then: (V, H) for nothing
    return _FusedLoss.apply(hidden, head, targets, objective, temperature, chunk, dtype)


class _FusedLoss(torch.autograd.Function):
    """Sum over chunks of objective(rows, logprobs of the rows); d logits = d loss / d logprob * (onehot - softmax)."""

    @staticmethod
    def forward(ctx, hidden, head, targets, objective, temperature, chunk, dtype):
        need_hidden, need_head = ctx.needs_input_grad[:2]
        matrix = head.to(hidden.dtype)
        loss = hidden.new_zeros((), dtype=dtype)
        logprobs = hidden.new_empty(len(hidden), dtype=dtype)
        entropies = torch.empty_like(logprobs)
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_head = torch.zeros_like(head, dtype=dtype) if need_head else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows] @ matrix.T).to(dtype).div_(temperature)  # (chunk, V)
            all_logprobs = logits.log_softmax(-1)
            probs = torch.exp(all_logprobs, out=logits)
            entropies[rows] = -torch.einsum("tv,tv->t", probs, all_logprobs)
            chunk_logprobs = all_logprobs.gather(-1, targets[rows, None])[:, 0]
            del all_logprobs, logits  # two buffers of (chunk, V) are the most that is alive
            logprobs[rows] = chunk_logprobs
            with torch.enable_grad():
                leaf = chunk_logprobs.requires_grad_()
                value = objective(rows, leaf)
            loss += value.detach()
            if need_hidden or need_head:
                slope, = torch.autograd.grad(value, leaf)
                grad_logits = probs.mul_(-slope[:, None] / temperature)
                grad_logits.scatter_add_(-1, targets[rows, None], slope[:, None] / temperature)
                grad_logits = grad_logits.to(hidden.dtype)
                del probs
                if need_hidden:
                    torch.mm(grad_logits, matrix, out=grad_hidden[rows])
                if need_head:
                    for part in range(0, len(head), VOCABULARY_PART):
                        part = slice(part, part + VOCABULARY_PART)
                        grad_head[part] += grad_logits[:, part].T @ hidden[rows]
                del grad_logits
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(logprobs, entropies)
        return loss, logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, _logprobs, _entropies):
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_loss != 1:  # else no copy of (V, H) is made
            grad_hidden = None if grad_hidden is None else (grad_hidden * grad_loss).to(grad_hidden.dtype)
            grad_head = None if grad_head is None else grad_head * grad_loss
        if grad_head is not None:
            grad_head = grad_head.to(ctx.head_dtype)
        return grad_hidden, grad_head, None, None, None, None, None
