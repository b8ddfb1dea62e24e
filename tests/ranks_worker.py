"""Started once a rank by test_ranks.py: gradients of one optimizer step for every case, written by rank 0."""

import sys
from dataclasses import replace

import torch
from accelerate import Accelerator
from test_update import batch, gradients_of_update, language_model, settings

CASES = {
    f"{reduction} {budget} {name}": (reduction, budget, rows)
    for reduction in ("token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm", "token_mean_legacy")
    for budget in (1, 25, 1000)
    for name, rows in {
        "mixed": batch(),
        "one row with signal": [row if i == 1 else replace(row, advantage=0.0) for i, row in enumerate(batch())],
        "no signal": [replace(row, advantage=0.0) for row in batch()],
    }.items()
}


def main(out):
    accelerator = Accelerator(cpu=True)
    found = {}
    for name, (reduction, budget, rows) in CASES.items():
        config = settings(f"algorithm.loss_reduction={reduction}", f"trainer.micro_batch_tokens={budget}")
        gradients, metrics = gradients_of_update(language_model(), rows, config)
        found[name] = torch.cat([gradient.flatten() for gradient in gradients.values()]), metrics
    if accelerator.is_main_process:
        torch.save(found, out)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
