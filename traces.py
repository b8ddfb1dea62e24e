"""Trials -> parquet: one shard a step, one row a trial, and the shards of a run as one file.

    python traces.py export runs/laptop --out traces.parquet

A row holds what the loss needs (ids, mask, logprobs, advantage) and what a reader needs (conversation, verdicts).
Leaves out: the published column set and pushing to the Hub.
"""

import argparse
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema([
    ("step", pa.int32()),
    ("task", pa.string()),
    ("group", pa.int32()),
    ("sample", pa.int32()),
    ("seed", pa.list_(pa.int64())),
    ("conversations", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ("prompt_ids", pa.list_(pa.int32())),
    ("response_ids", pa.list_(pa.int32())),
    ("loss_mask", pa.list_(pa.int8())),
    ("logprobs", pa.list_(pa.float32())),
    ("reward", pa.float64()),
    ("advantage", pa.float64()),
    ("outcome", pa.string()),
    ("ending", pa.string()),
    ("excluded", pa.bool_()),
    ("truncated", pa.bool_()),
    ("tests", pa.list_(pa.struct([("id", pa.string()), ("verdict", pa.string())]))),
    ("output", pa.string()),
    ("seconds_sampling", pa.float32()),
    ("seconds_grading", pa.float32()),
])


def write_shard(trials, step, run_dir: Path):
    """traces/step_000001.parquet, whole or not at all."""
    rows = [{
        "step": step, "task": t.task, "group": t.group, "sample": t.sample, "seed": list(t.seed),
        "conversations": t.messages, "prompt_ids": t.prompt_ids, "response_ids": t.response_ids,
        "loss_mask": t.loss_mask, "logprobs": t.logprobs, "reward": t.reward, "advantage": t.advantage,
        "outcome": t.outcome, "ending": t.ending, "excluded": t.excluded, "truncated": t.truncated,
        "tests": [{"id": test, "verdict": verdict} for test, verdict in sorted(t.tests.items())],
        "output": t.output, "seconds_sampling": t.seconds_sampling, "seconds_grading": t.seconds_grading,
    } for t in trials]
    folder = run_dir / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.parquet"
    temporary = path.with_name(f".writing_{path.name}")
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), temporary, compression="zstd")
    temporary.replace(path)


def export(run_dir: Path, out: Path) -> int:
    """All shards of a run in one file, a shard at a time. -> rows written. ValueError when there are no shards."""
    shards = sorted((run_dir / "traces").glob("step_*.parquet"))
    if not shards:
        raise ValueError(f"{run_dir / 'traces'}: no shard step_*.parquet")
    temporary = out.with_name(f".writing_{out.name}")
    rows = 0
    with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        for shard in shards:
            table = pq.read_table(shard)
            writer.write_table(table)
            rows += table.num_rows
    temporary.replace(out)
    return rows


def main():
    parser = argparse.ArgumentParser(description="Traces of a run as one parquet file.", epilog=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("export", help="write the shards of a run to one file")
    command.add_argument("run", type=Path, help="run folder, e.g. runs/laptop")
    command.add_argument("--out", type=Path, required=True, help="parquet file to write")
    args = parser.parse_args()
    try:
        rows = export(args.run, args.out)
    except (ValueError, OSError) as error:
        print(f"traces.py: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.out}: {rows} trials")


if __name__ == "__main__":
    main()
