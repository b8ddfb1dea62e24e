"""traces.py: every column there and back, several shards in one file, whole files or none."""

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import traces
from agent import Trial
from traces import SCHEMA, export, write_shard


def trial(task="t", **fields):
    return Trial(**{
        "task": task, "group": 3, "sample": 1, "seed": (42, 0, 7, 3, 1),
        "messages": [{"role": "user", "content": "Write f.\n"}, {"role": "assistant", "content": "é ```"}],
        "prompt_ids": [1, 151935], "response_ids": [5, 6, 2], "loss_mask": [1, 0, 1],
        "logprobs": [-0.5, -1.25, 0.0], "reward": 0.25, "outcome": "failed", "ending": "", "excluded": False,
        "truncated": True, "tests": {"test_b": "failed", "test_a": "passed"}, "output": "1 failed", "entropy": 0.7,
        "advantage": 1 / 3, "seconds_sampling": 1.5, "seconds_grading": 0.25} | fields)


def rows(path):
    return pq.read_table(path).to_pylist()


def test_every_column_comes_back(tmp_path):
    write_shard([trial()], 7, tmp_path)
    shard = tmp_path / "traces" / "step_000007.parquet"
    assert rows(shard) == [{
        "step": 7, "task": "t", "group": 3, "sample": 1, "seed": [42, 0, 7, 3, 1],
        "conversations": [{"role": "user", "content": "Write f.\n"}, {"role": "assistant", "content": "é ```"}],
        "prompt_ids": [1, 151935], "response_ids": [5, 6, 2], "loss_mask": [1, 0, 1],
        "logprobs": [-0.5, -1.25, 0.0], "reward": 0.25, "advantage": 1 / 3, "outcome": "failed", "ending": "",
        "excluded": False, "truncated": True,
        "tests": [{"id": "test_a", "verdict": "passed"}, {"id": "test_b", "verdict": "failed"}], "output": "1 failed",
        "seconds_sampling": 1.5, "seconds_grading": 0.25}]
    assert pq.read_schema(shard).equals(SCHEMA)


def test_an_excluded_trial_has_no_reward_and_may_have_no_tests(tmp_path):
    write_shard([trial(reward=None, excluded=True, outcome="infra", tests={}), trial(reward=0.0)], 1, tmp_path)
    lost, zero = rows(tmp_path / "traces" / "step_000001.parquet")
    assert (lost["reward"], lost["excluded"], lost["tests"]) == (None, True, [])
    assert zero["reward"] == 0.0


def test_a_step_without_trials_is_an_empty_shard(tmp_path):
    write_shard([], 1, tmp_path)
    assert pq.read_table(tmp_path / "traces" / "step_000001.parquet").schema.equals(SCHEMA)


def test_a_shard_is_written_whole_or_not_at_all(tmp_path):
    write_shard([trial("kept")], 1, tmp_path)
    with pytest.raises((pa.ArrowException, TypeError)):
        write_shard([trial("new"), trial(prompt_ids=["no id"])], 1, tmp_path)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["step_000001.parquet"]
    assert [row["task"] for row in rows(tmp_path / "traces" / "step_000001.parquet")] == ["kept"]
    write_shard([trial("new")], 1, tmp_path)
    assert [row["task"] for row in rows(tmp_path / "traces" / "step_000001.parquet")] == ["new"]


def test_export_of_three_shards_in_the_order_of_the_steps(tmp_path):
    for step in (10, 2, 1):
        write_shard([trial(f"a{step}"), trial(f"b{step}")], step, tmp_path)
    (tmp_path / "traces" / ".writing_step_000011.parquet").write_bytes(b"half of a sh")
    out = tmp_path / "all.parquet"
    out.write_bytes(b"what was there before")
    assert export(tmp_path, out) == 6
    assert [(row["step"], row["task"]) for row in rows(out)] == [
        (1, "a1"), (1, "b1"), (2, "a2"), (2, "b2"), (10, "a10"), (10, "b10")]
    assert pq.read_schema(out).equals(SCHEMA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.parquet", "traces"]


def test_a_broken_shard_leaves_the_old_export(tmp_path):
    write_shard([trial("kept")], 1, tmp_path)
    out = tmp_path / "all.parquet"
    export(tmp_path, out)
    (tmp_path / "traces" / "step_000002.parquet").write_bytes(b"no parquet file")
    with pytest.raises(ValueError, match="step_000002.parquet"):
        export(tmp_path, out)
    assert [row["task"] for row in rows(out)] == ["kept"]


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["traces.py", *map(str, arguments)])
    traces.main()


def test_the_command_says_what_it_wrote(tmp_path, monkeypatch, capsys):
    write_shard([trial(), trial()], 1, tmp_path)
    run_main(monkeypatch, "export", tmp_path, "--out", tmp_path / "out.parquet")
    assert capsys.readouterr().out == f"{tmp_path / 'out.parquet'}: 2 trials\n"


def test_no_shards_is_one_line_and_exit_status_2(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match=r"traces: no shard step_\*.parquet"):
        export(tmp_path, tmp_path / "out.parquet")
    with pytest.raises(SystemExit) as exit_:
        run_main(monkeypatch, "export", tmp_path / "nowhere", "--out", tmp_path / "out.parquet")
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"traces.py: {tmp_path / 'nowhere' / 'traces'}: no shard step_*.parquet\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_one_line_and_exit_status_2(tmp_path, monkeypatch, capsys):
    write_shard([trial()], 1, tmp_path)
    with pytest.raises(SystemExit) as exit_:
        run_main(monkeypatch, "export", tmp_path, "--out", tmp_path / "no" / "out.parquet")
    printed = capsys.readouterr().err
    assert exit_.value.code == 2 and printed.count("\n") == 1 and str(tmp_path / "no") in printed
