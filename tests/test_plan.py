"""The memory plan: counts worked by hand, bytes that autograd keeps, the answer for the published run."""

import json
import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import plan
from config import load_config

QWEN3_8B = {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
            "tie_word_embeddings": False}
SMALL = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
ROWS, LENGTH = 4, 96


@pytest.fixture
def qwen3_8b(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3_8B))
    return str(file)


def published(file, *overrides, processes=56, device_gb=96):
    return plan.memory_plan(load_config("rl_config.json", overrides), processes, device_gb, file)


def bytes_of(memory):
    return {item["name"]: item["bytes"] for item in memory["items"]}


def test_parameters_of_qwen3_8b_on_the_meta_device_equal_the_closed_form(qwen3_8b):
    shape = plan.read_shape("not read", qwen3_8b)
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2  # q and o, k and v
    block = attention + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128  # and the norms of the block and of q and k
    assert shape["block_parameters"] == block == 192_946_432
    assert shape["parameters"] == 36 * block + 2 * 151936 * 4096 + 4096 == 8_190_735_360


def test_items_of_the_published_run_worked_by_hand(qwen3_8b):
    memory = published(qwen3_8b)
    items = bytes_of(memory)
    share = 8_190_735_360 // 4
    assert items["weights"] == items["gradients"] == 4 * share
    assert items["AdamW moments"] == 8 * share
    assert items["sampler replica"] == 2 * 8_190_735_360
    assert items["key-value cache"] == 24 * 32768 * 147_456  # of a token: 36 x 2 x 8 heads x 128 x 2
    assert items["activations"] == 36 * 32768 * 4096 * 4 + 32768 * 4096 * 8  # each block's input
    assert items["logprob chunk"] == 512 * 151936 * 4 * 2
    assert not {"autocast copies", "gradient buckets", "reference model"} & set(items)
    for phase, total in memory["phases_gb"].items():
        parts = [item["gb"] for item in memory["items"] if phase in item["phases"]]
        assert total == pytest.approx(sum(parts))
    assert memory["peak_gb"] == max(memory["phases_gb"].values())


@pytest.mark.parametrize(("fsdp_size", "peak", "slots", "kept"), [(4, 168.0, 9, 49.14), (56, 137.5, 15, 18.72)])
def test_96_gb_hold_fewer_slots_of_the_published_run_than_24_in_the_worst_case(qwen3_8b, fsdp_size, peak, slots, kept):
    memory = published(qwen3_8b, f"trainer.fsdp_size={fsdp_size}")
    assert memory["peak_gb"] == memory["phases_gb"]["sample"] == pytest.approx(peak, abs=0.05)
    assert not memory["fits"]
    assert memory["largest_batch_slots"] == slots
    # by hand: kept are 16 N / fsdp_size + 2 N; 1.09 prefill; a slot is 4.83 + 1/72 of it + 0.006
    assert kept == pytest.approx((16 / fsdp_size + 2) * 8.190735, abs=0.01)
    assert (96 - kept - 1.09) // (4.832 * 73 / 72 + 0.006) == slots
    assert max(memory["phases_gb"][phase] for phase in ("forward", "backward", "step")) < 96


@pytest.mark.parametrize("device_gb", [90, 96, 141])
def test_the_largest_batch_slots_fits_and_one_more_does_not(qwen3_8b, device_gb):
    slots = published(qwen3_8b, device_gb=device_gb)["largest_batch_slots"]
    if device_gb == 90:  # the backward pass alone needs 92
        assert slots == 0
        assert not published(qwen3_8b, "rollout.batch_slots=1", device_gb=device_gb)["fits"]
    else:
        assert published(qwen3_8b, f"rollout.batch_slots={slots}", device_gb=device_gb)["fits"]
        assert not published(qwen3_8b, f"rollout.batch_slots={slots + 1}", device_gb=device_gb)["fits"]


def test_whole_states_on_each_device_do_not_shrink_with_more_processes(qwen3_8b):
    one = published(qwen3_8b, "trainer.fsdp_size=1", processes=1)
    many = published(qwen3_8b, "trainer.fsdp_size=1", processes=56)
    assert bytes_of(one)["AdamW moments"] == bytes_of(many)["AdamW moments"] == 8 * 8_190_735_360
    assert bytes_of(many)["gradient buckets"] == 4 * 8_190_735_360 and "gradient buckets" not in bytes_of(one)
    assert many["largest_batch_slots"] == 0 and not many["fits"]


def test_float32_shares_the_module_and_a_kl_term_adds_a_reference():
    items = bytes_of(plan.memory_plan(load_config("configs/laptop.json"), 1, None))
    assert "sampler replica" not in items and "autocast copies" not in items
    kl_config = load_config("configs/laptop.json", ["algorithm.kl_loss_coef=0.1"])
    with_kl = plan.memory_plan(kl_config, 1, None)
    assert bytes_of(with_kl)["reference model"] == items["weights"]
    assert with_kl["fits"] is None and with_kl["largest_batch_slots"] is None


def kept_by_autograd(dtype, attention, padded, checkpointing):
    """Bytes of the distinct storages that the forward pass saves, the parameters themselves aside."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL, attn_implementation=attention)).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held, so that no later tensor gets its address
        return tensor

    ids = torch.randint(0, 300, (ROWS, LENGTH))
    mask = torch.ones_like(ids)
    if padded:
        mask[1:, LENGTH - 20:] = 0
    with (torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
          torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")):
        model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_bytes_are_those_that_autograd_keeps(dtype, attention, padded, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "qwen3"}))
    shape = plan.read_shape("not read", str(tmp_path / "config.json"))
    tokens = ROWS * LENGTH
    expected = 3 * plan.block_bytes(shape, dtype, attention, tokens, LENGTH, padded) + tokens * 8 * 64
    if dtype == "bfloat16":
        expected += 2 * 3 * shape["block_parameters"]  # the autocast copies
    kept = kept_by_autograd(dtype, attention, padded, checkpointing=False)
    assert kept == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointing_keeps_the_float32_input_of_each_block(dtype):
    tokens = ROWS * LENGTH
    expected = 3 * tokens * 64 * 4 + 8 * tokens * 64
    assert kept_by_autograd(dtype, "sdpa", False, checkpointing=True) == pytest.approx(expected, rel=0.03)


def test_the_larger_micro_batch_is_planned(qwen3_8b):
    small = bytes_of(published(qwen3_8b, "trainer.micro_batch_tokens=1024"))
    assert small["activations"] == bytes_of(published(qwen3_8b))["activations"]  # one row of 32,768
    large = bytes_of(published(qwen3_8b, "trainer.micro_batch_tokens=65536"))
    assert large["activations"] == 2 * small["activations"]


def test_print_plan_gives_one_object_and_a_table(capsys):
    config = load_config("configs/laptop.json")
    plan.print_plan(config, as_json=True, processes=4, device_gb=16)
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"config", "batch", "memory"}
    assert found["batch"]["trajectories_per_process"] == 32  # 16 x 8 over 4
    assert found["memory"]["processes"] == 4 and found["memory"]["fits"] is True
    assert found["memory"]["parameters"] == plan.read_shape("warmstart")["parameters"] > 900_000
    plan.print_plan(config, as_json=False, device_gb=0.001)
    out = capsys.readouterr().out
    assert "key-value cache" in out and "does NOT fit in 0.001 GB" in out and "fits: none" in out


def test_an_unknown_model_leaves_the_batch_and_one_line(capsys, tmp_path, qwen3_8b):
    config = load_config("configs/laptop.json", [f"model.path={tmp_path / 'nothing'}"])
    plan.print_plan(config, as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out)["memory"] is None and json.loads(out)["batch"]["trajectories_per_step"] == 128
    assert err.count("\n") == 1 and "model.path" in err and "--model-config" in err
    plan.print_plan(config, as_json=True, model_config=qwen3_8b)
    assert json.loads(capsys.readouterr().out)["memory"]["parameters"] == 8_190_735_360


@pytest.mark.parametrize("content, message", [
    ("{", "not a valid JSON"), ('{"model_type": "gpt2"}', "gpt2 is not laid"),
    ('{"model_type": "qwen3", "hidden_size": "wide"}', "hidden_size"), ('{"hidden_size": 8}', "model_type")])
def test_a_bad_model_config_is_named(content, message, tmp_path):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ValueError, match=f"--model-config.*{message}"):
        plan.print_plan(load_config("configs/laptop.json"), False, model_config=str(tmp_path / "bad.json"))


@pytest.mark.parametrize("arguments, message", [
    ({"processes": 0}, "--processes"), ({"device_gb": -1.0}, "--device-gb"),
    ({"device_gb": math.nan}, "--device-gb"),
    ({"model_config": "nowhere.json"}, "--model-config: 'nowhere.json': no such file")])
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan.print_plan(load_config("configs/laptop.json"), as_json=False, **arguments)
