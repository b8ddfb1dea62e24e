"""The update: trials with advantages -> optimizer steps.

The rows of an optimizer step are weighted once, all together (loss.token_weights), then cut into micro-batches by a
token budget and dealt to the ranks; micro-batches and ranks only add gradients. A row without signal (advantage 0 and
no KL, or no trained token) is counted in the weights but not forwarded, since its gradient is 0. A step in which no
row has signal is still an optimizer step with zero gradients: AdamW's moments and weight decay move as if the rows
had been forwarded. Every rank forwards equally many micro-batches, an empty one where there is no row left.

Shapes: P prompts and B responses of a micro-batch, Lp and Lr their padded lengths, T trained tokens, H hidden size.
"""

import contextlib
import math

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import DynamicCache

from loss import fused_policy_loss, legacy_token_weights, token_weights


class Policy(torch.nn.Module):
    """The language model with its loss as forward, so that wrappers (DDP, autocast) see one module and one call."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, prompt_ids, prompt_mask, prompt_of, response_ids, response_mask, positions, **loss_arguments):
        """P prompts (P, Lp), padded on the left; B responses (B, Lr), padded on the right, to prompt_of (B,).

        positions (2, T): row and column of each trained token in response_ids. Each prompt is computed once, and its
        keys and values, through which the gradient flows back, are handed to all its responses; under activation
        checkpointing, which keeps no keys and values, each row is forwarded whole.
        """
        mask = torch.cat([prompt_mask[prompt_of], response_mask], dim=1)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        width = prompt_ids.shape[1]
        model = self.lm.base_model
        if self.lm.is_activation_checkpointing:
            ids = torch.cat([prompt_ids[prompt_of], response_ids], dim=1)
            hidden = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).last_hidden_state
            hidden = hidden[:, width - 1:]
        else:
            cache = DynamicCache(config=self.lm.config)
            first = model(input_ids=prompt_ids, attention_mask=prompt_mask, cache=cache, use_cache=True,
                          position_ids=(prompt_mask.cumsum(1) - 1).clamp(min=0)).last_hidden_state[:, -1:]
            cache.batch_select_indices(prompt_of)
            rest = model(input_ids=response_ids, attention_mask=mask, cache=cache, use_cache=True,
                         position_ids=places[:, width:]).last_hidden_state
            hidden = torch.cat([first[prompt_of], rest], dim=1)  # (B, 1 + Lr, H): column t predicts token t
        return fused_policy_loss(hidden[positions[0], positions[1]], self.lm.get_output_embeddings().weight,
                                 **loss_arguments)


def distribute(policy, accelerator, fsdp_size):
    """Spread `policy` over the processes, in place of what it was: DDP for fsdp_size 1, else FSDP2 (Zhao et al. 2023).

    fsdp_size processes share one copy of the weights, so of gradients and optimizer states too; if there are more
    processes, as many such copies take part (HSDP). Its parameters are DTensors afterwards: make the optimizer then.
    Both average gradients over all processes. bfloat16 by autocast (DDP) or by gathering bfloat16 weights (FSDP2).
    """
    if fsdp_size == 1:
        frozen = not any(parameter.requires_grad for parameter in policy.parameters())  # which DDP would refuse
        return accelerator.prepare_model(policy, evaluation_mode=frozen)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes // fsdp_size, fsdp_size),
                            mesh_dim_names=("replicate", "shard"))
    if accelerator.num_processes == fsdp_size:
        mesh = mesh["shard"]
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)  # or it would round advantages and weights too
    if accelerator.mixed_precision == "bf16":
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in policy.lm.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    return fully_shard(policy, mesh=mesh, mp_policy=precision)


def update(policy, reference, optimizer, accelerator, trials, step, config, progress=lambda: None) -> dict:
    """All optimizer steps of one batch of trials -> metrics. `reference`: the frozen model of the KL term, or None."""
    a, t = config.algorithm, config.trainer
    settings = {"temperature": config.rollout.temperature, "eps_clip_low": a.eps_clip_low,
                "eps_clip_high": a.eps_clip_high, "clip_ratio_c": a.clip_ratio_c,
                "tis_cap": a.tis_imp_ratio_cap if a.use_tis else None, "kl_estimator": a.kl_estimator_type}
    mini_batches = []
    for first in range(0, t.train_batch_size, t.policy_mini_batch_size):
        rows = [trial for trial in trials if first <= trial.group < first + t.policy_mini_batch_size]
        dealt = deal(rows, config, accelerator.process_index, accelerator.num_processes)
        mini_batches.append([collate(*micro_batch, accelerator.device) for micro_batch in dealt])

    policy.train()
    updates = len(mini_batches) * t.update_epochs_per_batch
    for batch in (batch for micro_batches in mini_batches for batch in micro_batches):
        with torch.no_grad():
            if updates > 1:  # the policy moves within the batch: the ratio is taken to where it stands now
                batch["old_logprobs"] = policy(**batch, **settings)[1]
            if reference is not None:
                batch["ref_logprobs"] = reference(**batch, **settings)[1]
        if reference is None:
            del batch["kl_weights"]

    total = torch.zeros(5, dtype=torch.float64, device=accelerator.device)  # loss, tokens, clipped, gap, ratio
    grad_norms, done = [], (step - 1) * updates
    for _ in range(t.update_epochs_per_batch):
        for micro_batches in mini_batches:
            lr = config.optimizer.lr * min(1, (done + 1) / max(config.optimizer.warmup_steps, 1))
            for group in optimizer.param_groups:  # a resumed run takes the config's values, not the checkpoint's
                group.update(lr=lr, betas=config.optimizer.betas, weight_decay=config.optimizer.weight_decay)
            optimizer.zero_grad()
            for index, batch in enumerate(micro_batches):
                last = index == len(micro_batches) - 1
                with contextlib.nullcontext() if last else accelerator.no_sync(policy):
                    loss, logprobs, _ = policy(**batch, **settings)
                    loss.backward()
                total += measured(loss, logprobs, batch, a)
                progress()
            # The weights make the gradient a sum, but the wrapper has averaged it over the ranks. Undone here and not
            # in the loss, where a factor of 3 would change the rounding of what the model computes in lower precision.
            for parameter in policy.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(accelerator.num_processes)
            norm = float(accelerator.clip_grad_norm_(policy.parameters(), config.optimizer.max_grad_norm))
            grad_norms.append(norm)
            if math.isfinite(norm):
                optimizer.step()
            else:
                accelerator.print(f"step {step}: gradient norm is {norm}, optimizer step skipped")
            done += 1
    policy.eval()
    loss, tokens, clipped, gap, ratio = accelerator.reduce(total, reduction="sum").tolist()
    return {"loss/policy": loss / updates, "loss/grad_norm": sum(grad_norms) / updates,
            "loss/clip_fraction": clipped / max(tokens, 1), "loss/ratio_mean": ratio / tokens if tokens else 1.0,
            "loss/trained_tokens": tokens / t.update_epochs_per_batch, "loss/lr": lr,
            "rollout/logprob_gap": gap / max(tokens, 1)}


def measured(loss, logprobs, batch, algorithm) -> torch.Tensor:
    """Sums over a micro-batch: loss, trained tokens, clipped tokens, |sampler - trainer| nats, importance ratio."""
    old = batch.get("old_logprobs", logprobs)
    ratio, sign = torch.exp(logprobs - old), torch.sign(batch["advantages"])
    clipped = (sign > 0) & (ratio > 1 + algorithm.eps_clip_high) | (sign < 0) & (ratio < 1 - algorithm.eps_clip_low)
    gap = (old - batch["rollout_logprobs"]).abs()
    return torch.stack([value.double() for value in (loss.detach(), logprobs.new_tensor(len(logprobs)),
                                                     clipped.sum(), gap.sum(), ratio.sum())])


def deal(rows, config, rank, world) -> list[tuple]:
    """The micro-batches of one rank: (rows, token weight of each row, KL weight of each row), equally many on each."""
    a = config.algorithm
    lengths = [sum(row.loss_mask) for row in rows]
    legacy = a.loss_reduction == "token_mean_legacy"  # its micro-batches are part of the objective: all rows in them
    used = [i for i, row in enumerate(rows) if legacy or lengths[i] and (row.advantage != 0 or a.kl_loss_coef > 0)]
    micro_batches = split(used, rows, config.trainer.micro_batch_tokens)
    if legacy:
        micro_batch_of = {i: number for number, members in enumerate(micro_batches) for i in members}
        weights = legacy_token_weights(lengths, [micro_batch_of[i] for i in range(len(rows))])
    else:
        weights = token_weights(lengths, a.loss_reduction, groups=[row.group for row in rows],
                                max_len=config.rollout.max_model_len, count_empty=a.count_empty_rows)
    kl_weights = a.kl_loss_coef * token_weights(lengths, "sequence_mean", count_empty=a.count_empty_rows)
    rounds = max(1, -(-len(micro_batches) // world))
    mine = (micro_batches + [[]] * (rounds * world - len(micro_batches)))[rank::world]
    return [([rows[i] for i in members], weights[members], kl_weights[members]) for members in mine]


def split(members, rows, budget) -> list[list[int]]:
    """Micro-batches of at most `budget` forwarded tokens, padding included, or of one row that has more.

    The rows of a prompt side by side repeat it less often, rows of one length side by side need less padding: of the
    two orders the one is taken that forwards fewer tokens.
    """
    ids = {}
    prompt = {i: ids.setdefault(tuple(rows[i].prompt_ids), len(ids)) for i in members}
    sizes = {i: (len(rows[i].prompt_ids), len(rows[i].response_ids)) for i in members}

    def forwarded(micro_batch):
        return (len({prompt[i] for i in micro_batch}) * max(sizes[i][0] for i in micro_batch)
                + len(micro_batch) * max(sizes[i][1] for i in micro_batch))

    candidates = []
    for order in (lambda i: (-sizes[i][0], prompt[i], -sizes[i][1], i), lambda i: (-sizes[i][1], prompt[i], i)):
        micro_batches = []
        for i in sorted(members, key=order):
            if micro_batches and forwarded([*micro_batches[-1], i]) <= budget:
                micro_batches[-1].append(i)
            else:
                micro_batches.append([i])
        candidates.append(micro_batches)
    return min(candidates, key=lambda micro_batches: sum(map(forwarded, micro_batches)))


def collate(rows, weights, kl_weights, device) -> dict:
    """The tensors that Policy.forward takes, with a column of each trained token (T,); without rows, T = 0."""
    ids = {}
    prompt_of = [ids.setdefault(tuple(row.prompt_ids), len(ids)) for row in rows] or [0]
    prompts, responses = list(ids) or [[0]], [row.response_ids for row in rows] or [[0]]
    where, columns = [], []
    for b, row in enumerate(rows):
        for i, trained in enumerate(row.loss_mask):
            if trained:
                where.append((b, i))
                columns.append((weights[b], kl_weights[b], row.advantage, row.logprobs[i]))
    positions = torch.tensor(where, dtype=torch.int64).reshape(-1, 2).T
    prompt_ids, prompt_mask = padded(prompts, "left")
    response_ids, response_mask = padded(responses, "right")
    weight, kl_weight, advantages, logprobs = torch.tensor(columns, dtype=torch.float64).reshape(-1, 4).T
    forwarded = max(response_ids.shape[1] - 1, 1)  # nothing is predicted from the last token of the longest response
    batch = {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "prompt_of": torch.tensor(prompt_of),
        "response_ids": response_ids[:, :forwarded], "response_mask": response_mask[:, :forwarded],
        "positions": positions,
        "targets": response_ids[positions[0], positions[1]],
        "weights": weight, "kl_weights": kl_weight, "advantages": advantages, "rollout_logprobs": logprobs,
    }
    return {name: column.to(device) for name, column in batch.items()}


def padded(ids, padding_side) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of ids -> (ids, mask), both (rows, longest)."""
    def pad(rows):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=padding_side)

    return pad([torch.tensor(row) for row in ids]), pad([torch.ones(len(row), dtype=torch.int64) for row in ids])
