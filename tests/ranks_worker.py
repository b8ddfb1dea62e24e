"""Started once a rank by test_ranks.py: updates of every case in every layout of the ranks, written by rank 0."""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from test_update import batch, language_model, settings
from torch.distributed.tensor import DTensor

import checkpoint
from train import refresh
from update import Policy, distribute, update

REDUCTIONS = ("token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm", "token_mean_legacy")
ROWS = {
    "mixed": batch(),
    "one row with signal": [row if i == 1 else replace(row, advantage=0.0) for i, row in enumerate(batch())],
    "no signal": [replace(row, advantage=0.0) for row in batch()],
}
SPLITS = {f"{reduction} {budget} {rows}": [f"algorithm.loss_reduction={reduction}",
                                           f"trainer.micro_batch_tokens={budget}"]
          for reduction in REDUCTIONS for budget in (1, 25, 1000) for rows in ROWS}
CORRECTED = "algorithm.use_tis=true", "algorithm.tis_imp_ratio_cap=1.5", "algorithm.clip_ratio_c=1.2"
OBJECTIVES = {
    **{f"KL {kind}": ["algorithm.kl_loss_coef=0.3", f"algorithm.kl_estimator_type={kind}"]
       for kind in ("k1", "k2", "k3")},
    "importance sampling": [*CORRECTED],
    "mini-batches": ["trainer.policy_mini_batch_size=2"],
    "epochs": ["trainer.policy_mini_batch_size=2", "trainer.update_epochs_per_batch=2"],
    "all of it": ["trainer.policy_mini_batch_size=2", "trainer.update_epochs_per_batch=2", *CORRECTED,
                  "algorithm.kl_loss_coef=0.3", "algorithm.kl_estimator_type=k3", "model.gradient_checkpointing=true"],
    "checkpointed activations": ["model.gradient_checkpointing=true"],
}
# sampled by another policy, whose logprobs are off by up to 4 nats
OFF_POLICY = [replace(row, logprobs=[-0.5 - 2.0 * (i % 3) for i in range(len(row.logprobs))]) for row in batch()]
IN_BFLOAT16 = {name: SPLITS[name] for name in ("token_mean 25 mixed", "sequence_mean 1000 mixed")}
IN_BFLOAT16["checkpointed sequence_mean 1000 mixed"] = ["model.gradient_checkpointing=true",
                                                         *SPLITS["sequence_mean 1000 mixed"]]


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def flat(tensors):
    return torch.cat([whole(tensor).flatten() for tensor in tensors])


def start(model, accelerator, fsdp_size, optimizer=torch.optim.SGD):
    policy = distribute(Policy(model), accelerator, fsdp_size)
    assert all(isinstance(p, DTensor) == (fsdp_size > 1) for p in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return policy, optimizer(policy.parameters(), lr=0.1)


def outcome(overrides, rows, accelerator, fsdp_size, dtype, updates=1):
    """(last gradients as one vector, weights as one vector, metrics of the last update)."""
    config = settings("optimizer.lr=0.01", "optimizer.max_grad_norm=1", *overrides)
    model, reference = language_model().to(dtype), None
    if "model.gradient_checkpointing=true" in overrides:
        model.activation_checkpointing_enable()
    if config.algorithm.kl_loss_coef > 0:
        reference = Policy(language_model(seed=9).to(dtype)).requires_grad_(False).eval()
        reference = distribute(reference, accelerator, fsdp_size)
    policy, optimizer = start(model, accelerator, fsdp_size)
    for step in range(1, updates + 1):
        metrics = update(policy, reference, optimizer, accelerator, rows, step, config)
    return flat(p.grad for p in model.parameters()), flat(model.parameters()), metrics


def replicas(accelerator, fsdp_size):
    """dtype -> does the sampler's copy equal the gathered weights on every rank, and have they moved."""
    model, found = language_model().float(), {}
    before, copies = flat(model.parameters()), {dtype: copy.deepcopy(model).to(dtype)
                                                for dtype in (torch.float32, torch.bfloat16)}
    policy, optimizer = start(model, accelerator, fsdp_size, torch.optim.AdamW)
    update(policy, None, optimizer, accelerator, batch(), 1, settings("optimizer.lr=0.1"))
    gathered = flat(model.parameters())
    for dtype, sampling_model in copies.items():
        refresh(sampling_model, model)
        equal = torch.equal(flat(sampling_model.parameters()), gathered.to(dtype))
        found[str(dtype)] = all(gather_object([equal])) and not torch.equal(gathered, before)
    return found


def relay(accelerator, folder, fsdp_size, leg):
    """Take over the run that `leg - 1` ranks saved, make one update, save. -> weights."""
    model = language_model(seed=leg)
    states = *start(model, accelerator, fsdp_size, torch.optim.AdamW), accelerator
    if leg == 1:
        model.load_state_dict(language_model(seed=0).state_dict())
    assert checkpoint.resume(folder, *states) == leg - 1
    update(*states[:1], None, *states[1:], batch(), leg, settings("optimizer.lr=0.01", "optimizer.weight_decay=0.1"))
    checkpoint.save(folder, leg, *states, keep=9)
    return flat(model.parameters())


def cases_of(ranks, precision) -> dict:
    """name -> overrides: all of them on one and two ranks, what may differ with the number on three and four."""
    if precision == "bf16":
        return IN_BFLOAT16
    if ranks == 3:
        return {name: case for name, case in SPLITS.items() if " 25 " in name} | {"all of it": OBJECTIVES["all of it"]}
    return {1: SPLITS | OBJECTIVES, 2: SPLITS | OBJECTIVES, 4: OBJECTIVES}[ranks]


def main(out, precision):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    ranks, found = accelerator.num_processes, {}
    layouts = {1: {"DDP": 1}, 2: {"DDP": 1, "FSDP": 2}, 3: {"DDP": 1, "FSDP": 3}, 4: {"HSDP": 2}}[ranks]
    for layout, fsdp_size in layouts.items():
        for name, overrides in cases_of(ranks, precision).items():
            rows = next((rows for key, rows in ROWS.items() if name.endswith(key)), OFF_POLICY)
            updates = 2 if rows is OFF_POLICY else 1
            for dtype in [torch.float32] if precision == "bf16" or ranks == 4 else [torch.float64, torch.float32]:
                found[layout, dtype, name] = outcome(overrides, rows, accelerator, fsdp_size, dtype, updates)
        found[layout, "replicas"] = replicas(accelerator, fsdp_size)
    if precision == "no" and ranks < 4:
        found["relay"] = relay(accelerator, Path(out).parent, ranks, leg=ranks)
    if accelerator.is_main_process:
        torch.save(found, out)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
