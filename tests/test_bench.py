"""bench.py: both ways count the tokens that they sampled, up to the first EOS; each part runs and gives its ratios."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import HERE, main, sample_ours, sample_usual
from config import load_config


def test_both_ways_count_tokens_up_to_the_first_eos():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=1)).eval()
    config = replace(load_config(str(HERE / "rl_config.json")).rollout, temperature=1.0, top_p=1.0, top_k=-1,
                     batch_slots=4, max_new_tokens=6, max_model_len=20)
    prompts = [[3, 4, 5], [6], [7, 3]]
    for way in (sample_ours, sample_usual):
        assert way(model, prompts, set(), config, 2) == 3 * 2 * 6
        assert way(model, prompts, set(range(8)), config, 2) == 3 * 2  # every first token ends its row
        assert 6 < way(model, prompts, {2}, config, 2) < 36


@pytest.mark.parametrize("part", [
    "kernel --tokens 8 --hidden 4 --vocabulary 16",
    "update --prompts 2 --group-size 2 --prompt-tokens 3 --new-tokens 4 --flat 0.5",
    "step --prompts 2 --group-size 2 --prompt-tokens 3 --new-tokens 4",
])
def test_each_part_gives_medians_and_ratios(part, tmp_path, monkeypatch):
    peer = tmp_path / "peer.py"
    peer.write_text('print("talk")\nprint(\'{"median_s": {"train_cpu": 5.0, "cpu": 7.0}}\')\n')
    more = [] if part.startswith("kernel") else ["--peer", f"{sys.executable} {peer}"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *part.split(), *more, "--repeats", "2", "--out", str(tmp_path / "o")])
    main()
    found = json.loads((tmp_path / "o").read_text())
    assert found["median"]["ours"]["cpu_s"] > 0 and len(found["all"]["usual"]) == 2
    assert found["ratio"]["ours / usual"].keys() == {"wall_s", "cpu_s", "extra_gb"}
    if more:
        assert found["median"]["peer"] == {"cpu_s": 5.0 if part.startswith("update") else 7.0}


def test_the_sandbox_part_gives_runs_a_second_of_both_runners(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", f"bench.py sandbox --repeats 1 --runs 1 --out {tmp_path / 'o'}".split())
    main()
    found = json.loads((tmp_path / "o").read_text())
    assert found["isolation"] in ("network", "mounts", "landlock")
    for name in ("1 at once, own", "2 at once, pytest"):
        speed = {way: figures["per_wall_s"] for way, figures in found[name]["median"].items()}
        assert found[name]["ratio"]["ours / usual"]["per_wall_s"] == pytest.approx(speed["ours"] / speed["usual"])
        assert min(speed.values()) > 0
