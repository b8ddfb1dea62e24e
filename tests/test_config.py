"""config.py: the files of the repository, extends, overrides, the round trip, one line for every mistake."""

import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from config import batch_plan, load_config, save_config, to_dict

ROOT = Path(__file__).resolve().parent.parent
BASE = str(ROOT / "rl_config.json")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a complete full.json, so that error texts hold plain relative names."""
    monkeypatch.chdir(tmp_path)
    Path("full.json").write_text(Path(BASE).read_text())
    return tmp_path


def write(name: str, content) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    return name


def message(path: str, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_config(path, list(overrides))
    text = str(caught.value)
    assert "\n" not in text
    return text


def differences(a, b) -> set[str]:
    a, b = to_dict(a), to_dict(b)
    return {f"{section}.{key}" for section in a for key in a[section] if a[section][key] != b[section][key]}


def test_rl_config_is_the_sequence_mean_arm():
    config = load_config(BASE)
    assert config.algorithm.loss_reduction == "sequence_mean" and config.algorithm.count_empty_rows is True
    assert (config.algorithm.eps_clip_low, config.algorithm.eps_clip_high) == (0.2, 0.05)
    assert config.algorithm.clip_ratio_c is None and config.data.eval is None
    assert config.optimizer.lr == 8e-6 and config.optimizer.betas == (0.9, 0.999)
    assert config.sandbox.passthrough == ("AgentTimeoutError",) and len(config.sandbox.mask) == 8
    with pytest.raises(FrozenInstanceError):
        config.optimizer.lr = 1.0


def test_token_mean_arm_differs_in_one_key_only():
    arm = load_config(str(ROOT / "configs" / "token_mean.json"))
    assert differences(load_config(BASE), arm) == {"algorithm.loss_reduction"}
    assert arm.algorithm.loss_reduction == "token_mean"


def test_the_saved_file_loads_back_equal(folder):
    overrides = ["algorithm.clip_ratio_c=3", "data.eval=tasks/é", 'trainer.log_with=["tensorboard"]']
    config = load_config("full.json", overrides)
    save_config(config, "resolved.json")
    assert load_config("resolved.json") == config
    assert json.loads(Path("resolved.json").read_text()) == to_dict(config)
    assert config.trainer.log_with == ("tensorboard",) and config.data.eval == "tasks/é"
    assert sorted(path.name for path in folder.iterdir()) == ["full.json", "resolved.json"]


def test_saving_replaces_an_older_file_and_a_failed_one_leaves_it(folder):
    save_config(load_config("full.json", ["trainer.seed=1"]), "run.json")
    save_config(load_config("full.json", ["trainer.seed=2"]), "run.json")
    assert load_config("run.json").trainer.seed == 2
    Path("run.json.tmp").mkdir()  # the draft cannot be written
    with pytest.raises(OSError):
        save_config(load_config("full.json", ["trainer.seed=3"]), "run.json")
    assert load_config("run.json").trainer.seed == 2


def test_extends_is_relative_to_the_file_and_may_form_a_chain(folder):
    write("configs/a.json", {"extends": "../full.json", "trainer": {"seed": 1, "epochs": 7}})
    write("configs/deep/b.json", {"extends": "../a.json", "trainer": {"seed": 2}, "data": {"limit": 5}})
    config = load_config("configs/deep/b.json")
    assert (config.trainer.seed, config.trainer.epochs, config.data.limit) == (2, 7, 5)
    assert differences(config, load_config("full.json")) == {"trainer.seed", "trainer.epochs", "data.limit"}


def test_a_child_replaces_a_list_as_a_whole(folder):
    write("child.json", {"extends": "full.json", "sandbox": {"mask": ["NetworkError"]}})
    assert load_config("child.json").sandbox.mask == ("NetworkError",)


def test_a_circle_of_files_is_refused(folder):
    write("a.json", {"extends": "sub/b.json"})
    write("sub/b.json", {"extends": "../a.json"})
    assert message("a.json") == "a.json: extends: sub/b.json: extends: a.json: a file may not extend itself"
    write("self.json", {"extends": "./self.json"})
    assert message("self.json") == "self.json: extends: self.json: a file may not extend itself"


def test_the_file_named_is_the_one_that_holds_the_value(folder):
    write("base.json", {"extends": "full.json", "optimizer": {"lr": "fast"}})
    write("child.json", {"extends": "base.json", "trainer": {"seed": 3}})
    assert message("child.json") == 'base.json: optimizer.lr: expected a number >= 0, found "fast"'
    write("child.json", {"extends": "full.json", "trainer": {"policy_mini_batch_size": 48}})
    expected = "trainer.policy_mini_batch_size: expected a divisor of train_batch_size 64, found 48"
    assert message("child.json") == f"child.json: {expected}"
    assert message("full.json", "trainer.policy_mini_batch_size=48") == f"override: {expected}"
    config = load_config("child.json", ["trainer.policy_mini_batch_size=32"])
    assert config.trainer.policy_mini_batch_size == 32


def test_overrides_are_json_or_else_text_and_the_last_one_wins(folder):
    config = load_config("full.json", [
        "optimizer.lr=5e-6", "trainer.run_dir=runs/a=b.c", "model.gradient_checkpointing=false",
        "data.eval=tasks", "trainer.eval_interval=5", "sandbox.mask=[]", "algorithm.clip_ratio_c=3",
        "trainer.seed=1", "trainer.seed=2", 'model.path="123"'])
    assert config.optimizer.lr == 5e-6 and config.trainer.run_dir == "runs/a=b.c"
    assert config.model.gradient_checkpointing is False and config.data.eval == "tasks"
    assert config.sandbox.mask == () and config.trainer.seed == 2 and config.model.path == "123"
    assert config.algorithm.clip_ratio_c == 3.0 and type(config.algorithm.clip_ratio_c) is float
    assert load_config("full.json", ["data.eval=tasks", "data.eval=null"]).data.eval is None


def test_an_integer_is_kept_as_a_float_where_a_float_is_asked(folder):
    overrides = ["rollout.top_p=1", "optimizer.betas=[0, 0.5]", "optimizer.weight_decay=0"]
    config = load_config("full.json", overrides)
    values = [config.rollout.top_p, *config.optimizer.betas, config.optimizer.weight_decay]
    assert values == [1.0, 0.0, 0.5, 0.0] and all(type(value) is float for value in values)
    assert load_config("full.json", ["rollout.top_k=-1"]).rollout.top_k == -1


@pytest.mark.parametrize("text", ["lr=1", "optimizer.lr", "optimizer", "", "optimizer:lr=1"])
def test_an_override_needs_section_key_and_value(folder, text):
    assert message("full.json", text) == f'override: expected section.key=value, found "{text}"'


@pytest.mark.parametrize("override, expected", [
    ("model.path=", "a non-empty string"),
    ("trainer.run_dir=7", "a non-empty string"),
    ("data.eval=false", "a non-empty string or null"),
    ("model.dtype=float16", "one of float32, bfloat16"),
    ("model.dtype=null", "one of float32, bfloat16"),
    ("model.attn_implementation=flash_attention_2", "one of sdpa, eager"),
    ("agent.kind=terminus", "one of single_turn"),
    ("sandbox.isolation=true", "one of auto, none"),
    ("sandbox.reward=shaped", "one of binary, pass_ratio"),
    ("algorithm.kl_estimator_type=[]", "one of k1, k2, k3"),
    ("trainer.resume_mode=null", "one of latest, none"),
    ("model.gradient_checkpointing=1", "true or false"),
    ("algorithm.use_tis=yes", "true or false"),
    ("trainer.seed=true", "an integer >= 0"),
    ("trainer.seed=-1", "an integer >= 0"),
    ("trainer.max_steps=0", "an integer >= 1"),
    ("trainer.max_steps=80.0", "an integer >= 1"),
    ("trainer.epochs=null", "an integer >= 1"),
    ("rollout.n_samples_per_prompt=1", "an integer >= 2"),
    ("algorithm.group_advantage_min_size=1", "an integer >= 2"),
    ("sandbox.memory_mb=63", "an integer >= 64"),
    ("sandbox.max_infra_share=1.5", "a number >= 0 and <= 1"),
    ("rollout.top_k=0", "-1 or an integer >= 1"),
    ("rollout.top_k=-2", "-1 or an integer >= 1"),
    ("rollout.temperature=0", "a number > 0"),
    ("rollout.temperature=false", "a number > 0"),
    ("rollout.top_p=0", "a number > 0 and <= 1"),
    ("rollout.top_p=1.01", "a number > 0 and <= 1"),
    ("algorithm.eps_clip_low=1", "a number >= 0 and < 1"),
    ("algorithm.eps_clip_high=-0.1", "a number >= 0"),
    ("algorithm.clip_ratio_c=1", "a number > 1 or null"),
    ("algorithm.tis_imp_ratio_cap=0", "a number > 0"),
    ("optimizer.lr=NaN", "a number >= 0"),
    ("optimizer.lr=Infinity", "a number >= 0"),
    ("optimizer.lr=1e999", "a number >= 0"),
    ("optimizer.lr=1" + 400 * "0", "a number >= 0"),
    ("optimizer.betas=0.9", "two numbers >= 0 and < 1"),
    ("optimizer.betas=[0.9]", "two numbers >= 0 and < 1"),
    ("optimizer.betas=[0.9, 1]", "two numbers >= 0 and < 1"),
    ("optimizer.betas=[0.9, NaN]", "two numbers >= 0 and < 1"),
    ("optimizer.betas=[0.9, true]", "two numbers >= 0 and < 1"),
    ("sandbox.mask=NetworkError", "a list of strings"),
    ("sandbox.zero=[1]", "a list of strings"),
    ("trainer.log_with={}", "a list of strings"),
])
def test_wrong_types_and_values(folder, override, expected):
    assert message("full.json", override).startswith(
        f"override: {override.partition('=')[0]}: expected {expected}, found ")


def test_the_value_found_is_shown_on_the_same_line(folder):
    text = message("full.json", "algorithm.loss_reduction=token\nmean")
    assert text == ("override: algorithm.loss_reduction: expected one of token_mean, sequence_mean, "
                    'prompt_mean, seq_mean_token_sum_norm, token_mean_legacy, found "token\\nmean"')


@pytest.mark.parametrize("override, expected", [
    ("algorithm.group_advantage_min_size=9",
     "override: algorithm.group_advantage_min_size: expected <= group size 8, found 9"),
    ("rollout.n_samples_per_prompt=3",
     "full.json: algorithm.group_advantage_min_size: expected <= group size 3, found 4"),
    ("trainer.policy_mini_batch_size=128",
     "override: trainer.policy_mini_batch_size: expected a divisor of train_batch_size 64, found 128"),
    ("trainer.train_batch_size=96",
     "full.json: trainer.policy_mini_batch_size: expected a divisor of train_batch_size 96, found 64"),
    ("rollout.max_new_tokens=32768",
     "override: rollout.max_new_tokens: expected < max_model_len 32768, found 32768"),
    ("trainer.eval_interval=5",
     "full.json: data.eval: expected a set for eval_interval 5, found null"),
    ('sandbox.zero=["NetworkError"]',
     'override: sandbox.zero: expected no name that mask has, found ["NetworkError"]'),
    ('sandbox.passthrough=["NetworkError"]',
     'override: sandbox.passthrough: expected no name that mask or zero has, found ["NetworkError"]'),
    ('sandbox.zero=["AgentTimeoutError"]',
     'full.json: sandbox.passthrough: expected no name that mask or zero has, found ["AgentTimeoutError"]'),
])
def test_limits_that_involve_two_keys(folder, override, expected):
    assert message("full.json", override) == expected


def test_values_on_the_edge_of_those_limits_are_allowed(folder):
    config = load_config("full.json", [
        "algorithm.group_advantage_min_size=8", "rollout.max_new_tokens=32767",
        "trainer.policy_mini_batch_size=1", "trainer.eval_interval=1", "data.eval=tasks"])
    assert config.algorithm.group_advantage_min_size == 8 and config.rollout.max_new_tokens == 32767


def test_unknown_names_are_refused_with_the_nearest_one(folder):
    assert message("full.json", "optimizer.lrr=1") == (
        'override: unknown key "optimizer.lrr"; the nearest is optimizer.lr')
    write("typo.json", {"extends": "full.json", "algorithm": {"loss_reducton": "token_mean"}})
    assert message("typo.json") == (
        'typo.json: unknown key "algorithm.loss_reducton"; the nearest is algorithm.loss_reduction')
    assert message("full.json", "trainer.optimizer.lr=1").startswith('override: unknown key "trainer.optimi')
    sections = "model, data, rollout, agent, sandbox, algorithm, optimizer, trainer"
    assert message("full.json", "algoritm.lr=1") == f'override: section "algoritm" is none of {sections}'
    write("section.json", {"extends": "full.json", "job_name": "arm0"})
    assert message("section.json") == f'section.json: section "job_name" is none of {sections}'


def test_missing_keys_and_sections_are_named(folder):
    content = json.loads(Path("full.json").read_text())
    del content["optimizer"]["lr"]
    write("no_key.json", content)
    assert message("no_key.json") == "no_key.json: optimizer.lr: missing, expected a number >= 0"
    assert load_config("no_key.json", ["optimizer.lr=0"]).optimizer.lr == 0.0
    del content["agent"]
    write("no_section.json", content)
    assert message("no_section.json") == "no_section.json: agent.kind: missing, expected one of single_turn"


def test_files_that_are_no_config(folder):
    assert message("absent.json").startswith("absent.json: cannot be read: ")
    assert "No such file" in message("absent.json")
    assert message(".").startswith(".: cannot be read: ")
    write("orphan.json", {"extends": "gone.json"})
    assert message("orphan.json").startswith("orphan.json: extends: gone.json: cannot be read: ")
    write("colon.json", '{"model": {},\n "data" 5}')  # a colon is missing before the ninth character
    assert message("colon.json").startswith("colon.json: cannot be read: ")
    assert "line 2 column 9" in message("colon.json")
    Path("latin.json").write_bytes(b'{"model": "\xe9"}')
    assert message("latin.json").startswith("latin.json: cannot be read: ")
    write("list.json", [1])
    assert message("list.json") == "list.json: expected an object, found [1]"
    write("flat.json", {"extends": "full.json", "optimizer": 5})
    assert message("flat.json") == "flat.json: optimizer: expected an object, found 5"
    write("extends.json", {"extends": ["full.json"]})
    assert message("extends.json") == 'extends.json: extends: expected a string, found ["full.json"]'


def test_a_key_given_twice_is_refused(folder):
    write("key.json", '{"extends": "full.json", "optimizer": {"lr": 1, "betas": [0, 0], "lr": 1}}')
    assert message("key.json") == 'key.json: cannot be read: key "lr" is given twice in one object'
    write("section.json", '{"extends": "full.json", "data": {"limit": 1}, "data": {"limit": 2}}')
    assert message("section.json") == 'section.json: cannot be read: key "data" is given twice in one object'


def test_batch_plan_of_the_published_run():
    config = load_config(BASE)
    assert batch_plan(config, world_size=56, n_tasks=5000) == {
        "prompts_per_step": 64,
        "trajectories_per_step": 512,  # 64 * 8
        "trajectories_per_process": 10,  # 512 / 56 = 9.14
        "optimizer_steps_per_batch": 1,
        "steps_per_epoch": 78,  # 5000 / 64 = 78.1
        "total_steps": 80,
        "max_response_tokens_per_step": 2_097_152,  # 512 * 4096
    }
    unlimited = load_config(BASE, ["trainer.max_steps=1000"])
    assert batch_plan(unlimited, world_size=4, n_tasks=5000)["total_steps"] == 156  # two epochs of 78


def test_batch_plan_counts_optimizer_steps():
    config = load_config(BASE, ["trainer.policy_mini_batch_size=16", "trainer.update_epochs_per_batch=3"])
    assert batch_plan(config, world_size=8, n_tasks=64)["optimizer_steps_per_batch"] == 12  # 64 / 16 * 3
    assert batch_plan(config, world_size=8, n_tasks=64)["total_steps"] == 2  # one step an epoch


def test_batch_plan_refuses_less_than_one_batch():
    with pytest.raises(ValueError, match=r"^data\.train: 63 tasks are fewer than trainer\.train_batch_size"):
        batch_plan(load_config(BASE), world_size=4, n_tasks=63)


def test_batch_plan_refuses_processes_that_cannot_share():
    with pytest.raises(ValueError, match=r"^trainer\.fsdp_size: 4 does not divide the processes \(6\)"):
        batch_plan(load_config(BASE), world_size=6, n_tasks=64)
