"""One optimizer step on 1, 2 and 3 processes (gloo): the same gradients in float64, however the rows are dealt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks_worker import CASES

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """processes -> case -> (all gradients as one vector, metrics)."""
    folder, found = tmp_path_factory.mktemp("ranks"), {}
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
                                "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    for processes in (1, 2, 3):
        out = folder / f"{processes}.pt"
        launched = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes),
             str(HERE / "ranks_worker.py"), str(out)],
            cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert launched.returncode == 0, launched.stderr
        found[processes] = torch.load(out)
    return found


def difference(a, b) -> float:
    """Largest difference, relative to the largest entry."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_gradients_do_not_depend_on_the_processes(gradients, case, processes):
    alone, metrics_alone = gradients[1][case]
    together, metrics = gradients[processes][case]
    assert alone.dtype == torch.float64
    if "no signal" in case:
        assert alone.abs().max() == together.abs().max() == 0
    else:
        assert alone.abs().max() > 0
        assert difference(together, alone) < 1e-12
    for name in ("loss/policy", "loss/grad_norm", "loss/trained_tokens", "rollout/logprob_gap"):
        assert metrics[name] == pytest.approx(metrics_alone[name], rel=1e-12, abs=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm"])
def test_gradients_do_not_depend_on_the_micro_batches(gradients, reduction, processes):
    whole, _ = gradients[1][f"{reduction} 1000 mixed"]
    for budget in (1, 25):
        assert difference(gradients[processes][f"{reduction} {budget} mixed"][0], whole) < 1e-12


@pytest.mark.slow
def test_the_legacy_token_mean_alone_depends_on_them(gradients):
    one_row_each, _ = gradients[1]["token_mean_legacy 1 mixed"]
    all_in_one, _ = gradients[1]["token_mean_legacy 1000 mixed"]
    assert difference(one_row_each, all_in_one) > 0.01
    # what made the published arms one: micro-batches of a single row, every row counted
    assert difference(one_row_each, gradients[1]["sequence_mean 1 mixed"][0]) < 1e-12
    # and in one micro-batch it is the token mean that its name says
    assert difference(all_in_one, gradients[1]["token_mean 1 mixed"][0]) < 1e-12
