"""checkpoint.py: what comes back after a save, what a killed run leaves, exports that anyone can load."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import checkpoint
from checkpoint import checkpoints, eos_ids, load_model, resume, rewind, save, write_atomically
from config import load_config, save_config
from update import Policy, distribute

BASE = str(Path(__file__).resolve().parent.parent / "rl_config.json")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def language_model(seed=0, tied=True, **more):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=11, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=2, **{"head_dim": 8, **more}))


def small_tokenizer(template=TEMPLATE):
    words = {word: i for i, word in enumerate(["<pad>", "<unk>", "<eos>", "a", "b", "c", "d", "e", "f", "g", "h"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = template
    return fast


def trainer(model):
    accelerator = Accelerator(cpu=True)
    policy = distribute(Policy(model), accelerator, 1)
    return policy, torch.optim.AdamW(policy.parameters(), lr=0.01), accelerator


def train(model, optimizer, steps):
    for _ in range(steps):
        # the next batch, as far as the optimizer has come
        torch.manual_seed(int(max((float(moments["step"]) for moments in optimizer.state.values()), default=0)))
        ids = torch.randint(11, (2, 6))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def state(model, optimizer):
    """Weights and AdamW's moments and step counts."""
    names = ("exp_avg", "exp_avg_sq", "step")
    moments = [optimizer.state[p][name].clone() for p in model.parameters() for name in names]
    return [p.detach().clone() for p in model.parameters()] + moments


def assert_same(found, expected):
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_four_steps_equal_two_and_two_after_a_resume(tmp_path, tied):
    model = language_model(tied=tied)
    states = trainer(model)
    optimizer = states[1]
    train(model, optimizer, 2)
    save(tmp_path, 2, *states, keep=2)
    at_two = state(model, optimizer)
    train(model, optimizer, 2)
    at_four = state(model, optimizer)

    other = language_model(seed=5, tied=tied)
    policy, optimizer, accelerator = trainer(other)
    assert resume(tmp_path, policy, optimizer, accelerator) == 2
    assert_same(state(other, optimizer), at_two)
    assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied
    assert accelerator.unwrap_model(policy).lm is other
    train(other, optimizer, 2)
    assert_same(state(other, optimizer), at_four)


def test_the_newest_are_kept(tmp_path):
    states, kept = trainer(language_model()), []
    for step in (2, 9, 10, 100):
        save(tmp_path, step, *states, keep=2)
        kept.append([found for found, _ in checkpoints(tmp_path)])
    assert kept == [[2], [2, 9], [9, 10], [10, 100]]  # by number and not by name
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["global_step_10", "global_step_100"]


def test_a_complete_checkpoint_is_never_taken_away_to_be_written_again(tmp_path):
    model = language_model()
    states = trainer(model)
    train(model, states[1], 1)
    save(tmp_path, 1, *states, keep=1)
    expected = state(model, states[1])
    inode = (tmp_path / "checkpoints" / "global_step_1").stat().st_ino
    save(tmp_path, 1, *states, keep=1)
    assert (tmp_path / "checkpoints" / "global_step_1").stat().st_ino == inode
    other = language_model(seed=5)
    states = trainer(other)
    assert resume(tmp_path, *states) == 1
    assert_same(state(other, states[1]), expected)


def test_a_checkpoint_that_was_never_finished_is_named_and_removed(tmp_path, capsys):
    states = trainer(language_model())
    save(tmp_path, 4, *states, keep=2)
    half = tmp_path / "checkpoints" / ".writing_global_step_9"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert resume(tmp_path, *states) == 4
    assert capsys.readouterr().out == f"{half}: was never finished, removed\n"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_4"]


def test_without_a_checkpoint_a_run_begins_anew(tmp_path):
    model = language_model()
    before = [p.detach().clone() for p in model.parameters()]
    states = trainer(model)
    assert resume(tmp_path, *states) == 0 and list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    assert resume(tmp_path, *states) == 0
    assert (tmp_path / "metrics.jsonl").read_text() == ""  # step 0 is evaluated and written again
    assert_same(list(model.parameters()), before)


def test_a_checkpoint_that_does_not_fit_is_one_line_and_cuts_nothing(tmp_path):
    save(tmp_path, 2, *trainer(language_model()), keep=2)
    folder, metrics = tmp_path / "checkpoints" / "global_step_2", tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    message = f"^trainer.run_dir: {folder} cannot be resumed from: .+$"
    with pytest.raises(ValueError, match=message) as misfit:
        resume(tmp_path, *trainer(language_model(head_dim=16)))
    next(folder.glob("*.distcp")).write_bytes(b"half")
    with pytest.raises(ValueError, match=message) as damaged:
        resume(tmp_path, *trainer(language_model()))
    assert "\n" not in str(misfit.value) + str(damaged.value)
    assert len(metrics.read_text().splitlines()) == 3


@pytest.mark.parametrize("end", ["", '{"step": 4, "rewa', '{"step": 3}'])
def test_logs_and_traces_are_cut_back(tmp_path, end):
    lines = [json.dumps({"step": step, "reward/mean": step / 10}) + "\n" for step in range(6)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + end)
    (tmp_path / "traces").mkdir()
    for step in range(1, 7):
        (tmp_path / "traces" / f"step_{step:06d}.parquet").write_bytes(b"x")
    rewind(tmp_path, 3)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:4])
    shards = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert shards == [f"step_00000{step}.parquet" for step in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "traces"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "deep" / "folder"

    def fail(folder):
        (folder / "file").write_text("half")
        raise OSError("disk full")

    write_atomically(path, lambda folder: (folder / "file").write_text("first"))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert (path / "file").read_text() == "first"
    write_atomically(path, lambda folder: (folder / "other").write_text("second"))
    assert [file.name for file in path.iterdir()] == ["other"]  # replaced, not merged
    assert [file.name for file in path.parent.iterdir()] == ["folder"]


def exported(tmp_path, model=None, tokenizer=None):
    model, tokenizer = model or language_model(), tokenizer or small_tokenizer()
    save_config(load_config(BASE), str(tmp_path / "rl_config.json"))
    checkpoint.export(tmp_path, 5, model, tokenizer)
    return tmp_path / "exports" / "global_step_5"


def test_an_export_loads_with_equal_logits_and_a_tied_head(tmp_path):
    model = language_model()
    folder = exported(tmp_path, model)
    loaded, ids = AutoModelForCausalLM.from_pretrained(folder), torch.tensor([[3, 4, 5, 6]])
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a b h").input_ids == [3, 4, 10] and tokenizer.chat_template == TEMPLATE
    assert load_config(str(folder / "rl_config.json")) == load_config(BASE)
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["global_step_5"]


def model_config(path, *overrides):
    return load_config(BASE, [f"model.path={path}", "model.gradient_checkpointing=false", *overrides]).model


def test_load_model_gives_float32_in_eval_mode(tmp_path):
    model = language_model()
    loaded, tokenizer = load_model(model_config(exported(tmp_path, model)))
    assert loaded.dtype == torch.float32 and not loaded.training and tokenizer.chat_template == TEMPLATE
    assert_same(list(loaded.parameters()), [p.detach() for p in model.parameters()])
    bf16, _ = load_model(model_config(exported(tmp_path, language_model().bfloat16())))
    assert bf16.dtype == torch.float32


def test_load_model_switches_every_dropout_off(tmp_path):
    folder = exported(tmp_path, GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=32, n_layer=2, n_head=4)))
    assert AutoModelForCausalLM.from_pretrained(folder).transformer.drop.p == 0.1
    loaded, _ = load_model(model_config(folder))
    assert {m.p for m in loaded.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, loaded.train()(ids).logits)


def test_chat_template_of_a_file(tmp_path):
    folder = exported(tmp_path, tokenizer=small_tokenizer(None))
    with pytest.raises(ValueError, match="model.chat_template: the tokenizer of .* has none: name a .jinja file"):
        load_model(model_config(folder))
    with pytest.raises(ValueError, match="model.chat_template: .*missing.jinja: No such file"):
        load_model(model_config(folder, f"model.chat_template={tmp_path}/missing.jinja"))
    (tmp_path / "own.jinja").write_text("<{{ messages[0].content }}>")
    _, tokenizer = load_model(model_config(folder, f"model.chat_template={tmp_path}/own.jinja"))
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<a>"



def no_json(folder):
    (folder / "config.json").write_text("{")


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def half_weights(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])


def no_model_type(folder):
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize("damage", [no_json, no_model_type, no_weights, half_weights])
def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path, damage):
    folder = exported(tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=f"^model.path: no model can be loaded from '{folder}': .+$") as error:
        load_model(model_config(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_a_model_is_one_line(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"^model.path: no model can be loaded from '{tmp_path / name}': ") as error:
        load_model(model_config(tmp_path / name))
    assert "\n" not in str(error.value)


def test_eos_ids_of_all_three_places():
    model, tokenizer = language_model(), small_tokenizer()  # the config says 2, the tokenizer <eos> is 2
    assert eos_ids(model, tokenizer) == {2}
    model.generation_config.eos_token_id = [7, 8]
    assert eos_ids(model, tokenizer) == {2, 7, 8}
    model.config.eos_token_id, tokenizer.eos_token = 9, "a"
    assert eos_ids(model, tokenizer) == {3, 7, 8, 9}
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        eos_ids(model, tokenizer)
