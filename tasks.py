"""Harbor tasks from a directory, a parquet file, the Hub, or generated ones.

A task is an instruction for the model and the files that judge its answer. A task directory is one that holds
`instruction.md`; a parquet file holds one packed task directory a row (`path`: string, `task_binary`: plain
or gzip tar of the directory's contents), the layout of the published task sets.
archives.py unpacks them; generator.py makes the tasks of a `generated:` source.

Left out: Dockerfiles are carried along but never built, symbolic links to directories are not followed, file
modes are not kept. No task's code runs here; `verify` asks quarantine.py.

    python tasks.py list tasks/
    python tasks.py verify generated:chains:train:320 --workers 4 --quarantine quarantine.json
    python tasks.py pack tasks/ tasks.parquet
    python tasks.py unpack owner/name tasks_of_name/
"""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import datasets
import pyarrow
import pyarrow.parquet

from archives import BROKEN, Entry, Task, archive, archive_entries, collect, file_mode
from generator import generate

COLUMNS = ("path", "task_binary")
TEST_FILE = re.compile(r"tests/(.*/)?(test_[^/]*\.py|[^/]*_test\.py|test\.sh)")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
LEFTOVERS = ("__pycache__", ".pytest_cache")


def load_tasks(source: str, limit: int = 0) -> list[Task]:
    """Tasks of a directory (sorted by id), of a parquet file or Hub data set (in row order), or generated.

    A source is a path, `generated:FAMILY:SPLIT:COUNT`, or else `owner/name` on the Hub, which is not asked
    when a local directory `owner` makes a mistyped path likelier. `limit` keeps the first tasks; 0 keeps all.
    Raises ValueError, one line that names the source or the task, for a missing source, a broken or unsafe
    archive, a task without instruction or without tests, and an id that occurs twice.
    """
    if limit < 0:
        raise ValueError(f"limit is {limit}, must be 0 (all) or more")
    path = Path(source)
    if source.startswith("generated:"):
        return _generated(source, limit)
    elif path.is_dir():
        found = _directory_tasks(path)
    elif path.is_file():
        found = _packed_tasks(source, _parquet_rows(path))
    elif HUB_ID.fullmatch(source) and not source.endswith(".parquet") and not path.parent.exists():
        found = _packed_tasks(source, _hub_rows(source))
    else:
        raise ValueError(f"{source}: no such file or directory")

    tasks: list[Task] = []
    origin: dict[str, str] = {}
    for where, id, entries in found:
        if id in origin:
            raise ValueError(f"task id {id!r} occurs twice: {origin[id]} and {where}")
        origin[id] = where
        tasks.append(_read_task(where, id, entries))
        if len(tasks) == limit:
            break
    if not tasks:
        raise ValueError(f"{source}: holds no task")
    return tasks


def list_tests(task: Task) -> list[str]:
    """Paths of the files that judge an answer: test_*.py, *_test.py and test.sh, anywhere under tests/."""
    return sorted(path for path in task.files if TEST_FILE.fullmatch(path))


# --- reading ------------------------------------------------------------------------------------------------


def _read_task(where: str, id: str, entries: Iterable[Entry]) -> Task:
    if id in ("", ".", "..") or not id.isprintable():
        raise ValueError(f"{where}: {id!r} cannot name a task directory")
    try:
        files = collect(entries)
    except BROKEN as error:
        raise ValueError(f"{where}: refused: {_one_line(error)}") from None
    try:
        instruction = files.pop("instruction.md", b"").decode()
    except UnicodeDecodeError:
        raise ValueError(f"{where}: instruction.md is not UTF-8 text") from None
    if not instruction.strip():
        raise ValueError(f"{where}: instruction.md is missing or empty")
    task = Task(id, instruction, files)
    if not list_tests(task):
        raise ValueError(f"{where}: task {id!r} has no test_*.py, *_test.py or test.sh under tests/")
    return task


def _directory_tasks(root: Path) -> Iterator[tuple[str, str, Iterator[Entry]]]:
    def unreadable(error: OSError) -> None:
        raise ValueError(f"{error.filename}: {error.strerror}")

    found = []
    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        if "instruction.md" in names:
            found.append(Path(folder))
            subfolders.clear()
    for folder in sorted(found, key=lambda folder: (folder.resolve().name, folder)):
        yield str(folder), folder.resolve().name, _directory_entries(folder)


def _directory_entries(root: Path) -> Iterator[Entry]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in LEFTOVERS)
        for name in sorted(names):
            path = Path(folder, name)
            if not path.is_file():
                raise ValueError(f"{str(path.relative_to(root))!r} is no regular file")
            yield path.relative_to(root).as_posix(), path.stat().st_size, path.read_bytes


def _packed_tasks(source: str, rows: Iterable[dict]) -> Iterator[tuple[str, str, Iterator[Entry]]]:
    for number, row in enumerate(rows):
        path, data = (row[column] for column in COLUMNS)
        if (type(path), type(data)) != (str, bytes):
            raise ValueError(f"{source}: row {number}: path must be a string and task_binary bytes")
        yield f"{source}: row {number} {path!r}", PurePosixPath(path).name, archive_entries(data)


def _parquet_rows(path: Path) -> Iterator[dict]:
    # In small batches: only one batch of archives and the unpacked tasks are held at a time.
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_columns(str(path), file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=64, columns=list(COLUMNS)):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file: {_one_line(error)}") from None


def _hub_rows(source: str) -> Iterable[dict]:
    try:
        rows = datasets.load_dataset(source, split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{source}: no such path, and not read from the Hub: {_one_line(error)}") from None
    _check_columns(source, rows.column_names)
    return rows


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_columns(source: str, names: list[str]) -> None:
    if missing := [column for column in COLUMNS if column not in names]:
        raise ValueError(f"{source}: no column {' or '.join(missing)}; it has {', '.join(names)}")


# --- writing ------------------------------------------------------------------------------------------------


def pack(tasks: list[Task] | str, parquet_path: str) -> int:
    """Write tasks, or those of a source, as one parquet file; equal tasks, equal bytes. Returns how many."""
    tasks = load_tasks(tasks) if isinstance(tasks, str) else tasks
    if not tasks:
        raise ValueError(f"{parquet_path}: no task to pack")
    schema = pyarrow.schema([("path", pyarrow.string()), ("task_binary", pyarrow.binary())])
    temporary = f"{parquet_path}.{os.getpid()}.tmp"
    try:
        with pyarrow.parquet.ParquetWriter(temporary, schema) as writer:
            for start in range(0, len(tasks), 64):
                rows = [
                    {"path": task.id, "task_binary": archive(task)} for task in tasks[start : start + 64]
                ]
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
        os.replace(temporary, parquet_path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return len(tasks)


def unpack(source: str, directory: str) -> int:
    """Write each task of `source` to `directory`/ID, whole or not at all. Returns how many.

    Raises ValueError before anything is written when one of them is there already.
    """
    tasks = load_tasks(source)
    for task in tasks:
        if Path(directory, task.id).exists():
            raise ValueError(f"{Path(directory, task.id)}: exists already, nothing is overwritten")
    Path(directory).mkdir(parents=True, exist_ok=True)
    for task in tasks:
        temporary = Path(tempfile.mkdtemp(prefix=".unpack-", dir=directory))
        try:
            for name, data in {"instruction.md": task.instruction.encode(), **task.files}.items():
                path = temporary / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                path.chmod(file_mode(name))
            temporary.chmod(0o755)
            temporary.rename(Path(directory, task.id))
        except BaseException:
            shutil.rmtree(temporary)
            raise
    return len(tasks)


def _generated(source: str, limit: int) -> list[Task]:
    try:
        _, family, split, count = source.split(":")
        number = int(count)
    except ValueError:
        raise ValueError(f"{source}: must be generated:FAMILY:SPLIT:COUNT") from None
    try:
        return generate(family, split, min(number, limit) if limit else number)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


# --- the command line ---------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "pack":
        print(f"{pack(arguments.source, arguments.out)} tasks packed into {arguments.out}")
    elif arguments.command == "unpack":
        print(f"{unpack(arguments.source, arguments.out)} tasks unpacked into {arguments.out}")
    elif arguments.command == "list":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `list | head` ends quietly
        for task in load_tasks(arguments.source):
            print(f"{task.id}  {len(list_tests(task))}  {task.instruction.strip().splitlines()[0]}")
    else:
        return _verify(arguments)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    # Imported here: whoever reads or generates tasks needs no sandbox.
    import quarantine
    from sandbox import Sandbox

    if arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}, must be 1 or more")
    out = arguments.quarantine
    if out and not Path(out).parent.is_dir():  # known now, not when all is verified
        raise ValueError(f"--quarantine: {Path(out).parent}: no such directory")
    tasks = load_tasks(arguments.source)
    with Sandbox(arguments.workers, arguments.timeout, arguments.memory_mb, arguments.isolation) as sandbox:
        bad = quarantine.verify_all(tasks, sandbox, arguments.workers)
    if out:
        quarantine.write(bad, out)
    width = max(map(len, bad), default=0)
    for id in sorted(bad):
        print(f"{id:{width}}  {bad[id]}")
    print(f"{len(tasks) - len(bad)} of {len(tasks)} tasks are good")
    return 1 if bad else 0


def main() -> int:
    """Exit status: 0 done (and every verified task is good), 1 a bad task, 2 bad input, 3 the machine cannot grade."""
    parser = argparse.ArgumentParser(
        description="Harbor tasks: list, verify, pack, unpack.\n\n"
        "SOURCE is a directory of task directories, a parquet file, owner/name on the Hub, or\n"
        "generated:FAMILY:SPLIT:COUNT with family chains, strings, lists or mixed and split\n"
        "warmstart, train or heldout.",
        epilog="examples:\n" + __doc__[__doc__.index("    python tasks.py list") :],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("list", help="id, number of test files, first line of each instruction")
    command.add_argument("source")
    command = commands.add_parser("verify", help="references must pass, solutions that do nothing fail; exit 1 if not")
    command.add_argument("source")
    command.add_argument("--workers", type=int, default=2, help="runs at once (default 2)")
    command.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds of a run (default 10)")
    command.add_argument("--memory-mb", type=int, default=512, metavar="M", help="MB of a run (default 512)")
    command.add_argument("--isolation", choices=("auto", "none"), default="auto", help="as sandbox.isolation")
    command.add_argument("--quarantine", metavar="FILE", help="write the bad tasks, for data.quarantine")
    command = commands.add_parser("pack", help="write one parquet file")
    command.add_argument("source")
    command.add_argument("out", help="parquet file")
    command = commands.add_parser("unpack", help="write task directories; nothing is overwritten")
    command.add_argument("source")
    command.add_argument("out", help="directory")
    arguments = parser.parse_args()
    try:
        return _run(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"tasks.py: {error}", file=sys.stderr)
        return 3 if isinstance(error, RuntimeError) else 2


if __name__ == "__main__":
    sys.exit(main())
