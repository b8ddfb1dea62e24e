"""bench.py: both ways count the tokens that they sampled, up to the first EOS."""

from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import HERE, ours, usual
from config import load_config


def test_both_ways_count_tokens_up_to_the_first_eos():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=1)).eval()
    config = replace(load_config(str(HERE / "rl_config.json")).rollout, temperature=1.0, top_p=1.0, top_k=-1,
                     batch_slots=4, max_new_tokens=6, max_model_len=20)
    prompts = [[3, 4, 5], [6], [7, 3]]
    for way in (ours, usual):
        assert way(model, prompts, set(), config, 2, 0) == 3 * 2 * 6
        assert way(model, prompts, set(range(8)), config, 2, 0) == 3 * 2  # every first token ends its row
        assert 6 < way(model, prompts, {2}, config, 2, 0) < 36
