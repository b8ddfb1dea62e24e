"""Shared by all tests: no hub, one thread a process (two cores are shared by all ranks and graders), small models."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

import warmstart

MEMORISED = "generated:chains:train:16"


@pytest.fixture(scope="session")
def memorising_model(tmp_path_factory):
    """Folder of a very small model that knows the 16 tasks of MEMORISED by heart, slips included: mixed groups."""
    folder = tmp_path_factory.mktemp("models") / "memorising"
    warmstart.build(folder, seed=0, source=MEMORISED, steps=220, batch=16, hidden_size=96, intermediate_size=192,
                    num_hidden_layers=2, num_attention_heads=3)
    return folder
