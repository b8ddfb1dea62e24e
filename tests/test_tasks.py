import ast
import doctest
import gzip
import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
import time
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import archives
import generator
import tasks
from archives import Task
from generator import FAMILIES, SPLITS, generate, operations, split_of, write_solution
from tasks import load_tasks, pack, unpack

ROOT = Path(tasks.__file__).parent
GOOD = {"instruction.md": b"Add.\n", "tests/test_solution.py": b"def test_0():\n    assert True\n"}


def write_tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_parquet(path: Path, rows: list[tuple], names: tuple = ("path", "task_binary")) -> str:
    columns = [list(column) for column in zip(*rows)] if rows else [[], []]
    pyarrow.parquet.write_table(pyarrow.table(dict(zip(names, columns))), path)
    return str(path)


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields) -> tuple:
    """A tar header, with any of its fields set, and its data."""
    header = tarfile.TarInfo(name)
    header.size, header.type = len(data), kind
    for field, value in fields.items():
        setattr(header, field, value)
    return header, data


def tar(*members, format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for header, data in members:
            archive.addfile(header, io.BytesIO(data))
    return buffer.getvalue()


def good_tar(*more) -> bytes:
    return tar(*(member(name, data) for name, data in GOOD.items()), *more)


def with_header(**fields) -> bytes:
    """A good tar whose third member has just this header, no data, then the end mark."""
    header, _ = member("extra", **fields)
    return good_tar()[:2048] + header.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def fails(source: str, *parts: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_tasks(source)
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


def names_of(source: str, names: dict | None = None) -> dict:
    """What a source text defines, run here: these texts come from the generator and from this file."""
    names = {} if names is None else names
    exec(source, names)  # noqa: S102
    return names


def count_passed(task: Task, solution: str) -> int:
    """Hidden tests passed by the source text of a solution; an exception fails its test only."""
    text = task.files["tests/test_solution.py"].decode()
    first, rest = text.split("\n", 1)
    assert first == "from solution import solve"
    names = names_of(rest, names_of(solution))
    passed = 0
    for number in range(5):
        try:
            names[f"test_{number}"]()
            passed += 1
        except (AssertionError, TypeError, IndexError):
            pass
    return passed


# --- directories and parquet files


def test_directory_is_read_by_id_and_keeps_every_other_file(tmp_path):
    write_tree(tmp_path / "b" / "two", GOOD | {"task.toml": b"x", "tests/data/big.bin": b"\0\xff"})
    write_tree(tmp_path / "z" / "one", GOOD | {"tests/__pycache__/test_solution.pyc": b"stale"})
    write_tree(tmp_path / "b" / "two" / "inner", GOOD)  # no task of its own: there is no descent into a task
    one, two = load_tasks(str(tmp_path))
    assert one == Task("one", "Add.\n", {"tests/test_solution.py": GOOD["tests/test_solution.py"]})
    assert two.id == "two"
    assert sorted(two.files) == [
        "inner/instruction.md",
        "inner/tests/test_solution.py",
        "task.toml",
        "tests/data/big.bin",
        "tests/test_solution.py",
    ]
    assert two.files["tests/data/big.bin"] == b"\0\xff"
    assert load_tasks(str(tmp_path / "z" / "one")) == [one]
    assert load_tasks(str(tmp_path), limit=1) == [one]


def test_a_task_directory_may_be_named_by_a_dot(tmp_path, monkeypatch):
    write_tree(tmp_path / "one", GOOD)
    monkeypatch.chdir(tmp_path / "one")
    assert [task.id for task in load_tasks(".")] == ["one"]


@pytest.mark.parametrize(
    "name", ["tests/test_a.py", "tests/a_test.py", "tests/test.sh", "tests/b/c/test_a.py"]
)
def test_what_counts_as_a_test(tmp_path, name):
    write_tree(tmp_path / "one", {"instruction.md": b"Add.", name: b""})
    assert tasks.list_tests(load_tasks(str(tmp_path))[0]) == [name]


@pytest.mark.parametrize("name", ["test_a.py", "tests/helper.py", "tests/test_a/x.py", "solution/test_a.py"])
def test_what_does_not_count_as_a_test(tmp_path, name):
    write_tree(tmp_path / "one", {"instruction.md": b"Add.", name: b""})
    fails(str(tmp_path), str(tmp_path / "one"), "task 'one' has no test_*.py")


def test_parquet_rows_keep_their_order_and_may_be_plain_or_gzip(tmp_path):
    noted = good_tar(member("./notes.txt", b"n"))
    rows = [("set/b", good_tar()), ("a", gzip.compress(good_tar())), ("c/", noted)]
    loaded = load_tasks(write_parquet(tmp_path / "t.parquet", rows))
    assert [task.id for task in loaded] == ["b", "a", "c"]
    assert loaded[0].files == {"tests/test_solution.py": GOOD["tests/test_solution.py"]}
    assert loaded[2].files["notes.txt"] == b"n"
    assert load_tasks(str(tmp_path / "t.parquet"), limit=2) == loaded[:2]


def test_extra_columns_and_column_order_do_not_matter(tmp_path):
    source = write_parquet(tmp_path / "t.parquet", [(1, good_tar(), "one")], ("n", "task_binary", "path"))
    assert [task.id for task in load_tasks(source)] == ["one"]


def test_long_names_of_both_tar_dialects_are_read(tmp_path):
    name = "tests/" + "d" * 120 + "/test_" + "é" * 60 + ".py"
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        data = tar(member("instruction.md", b"Add."), member(name, b"x"), format=format)
        (task,) = load_tasks(write_parquet(tmp_path / "t.parquet", [("one", data)]))
        assert task.files == {name: b"x"}


def test_pack_and_unpack_round_trip(tmp_path):
    made = generate("mixed", "train", 130)
    packed, again, folder = str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"), str(tmp_path / "out")
    assert pack(made, packed) == 130
    assert load_tasks(packed) == made
    assert unpack(packed, folder) == 130
    assert load_tasks(folder) == made
    assert pack(folder, again) == 130
    assert Path(packed).read_bytes() == Path(again).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "b.parquet", "out"]
    first = Path(folder, made[0].id)
    assert os.access(first / "tests/test.sh", os.X_OK)
    assert first.stat().st_mode & 0o777 == 0o755
    assert (first / "task.toml").stat().st_mode & 0o777 == 0o644


def test_unpack_overwrites_nothing(tmp_path):
    pack(generate("chains", "train", 3), str(tmp_path / "t.parquet"))
    last = load_tasks(str(tmp_path / "t.parquet"))[2].id
    write_tree(tmp_path / "out" / last, {"mine.txt": b"keep"})
    with pytest.raises(ValueError, match=f"{last}: exists already"):
        unpack(str(tmp_path / "t.parquet"), str(tmp_path / "out"))
    assert [str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")] == [
        last,
        f"{last}/mine.txt",
    ]


def test_a_task_that_cannot_be_written_leaves_nothing(tmp_path):
    good = generate("chains", "train", 1)[0]
    pack([good, Task("wide", "Add.", {"tests/test_a.py": b"", "x" * 300: b""})], str(tmp_path / "t.parquet"))
    with pytest.raises(OSError, match="File name too long"):
        unpack(str(tmp_path / "t.parquet"), str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [good.id]


def test_a_failed_pack_keeps_the_old_file(tmp_path):
    good = generate("chains", "train", 1)
    pack(good, str(tmp_path / "t.parquet"))
    with pytest.raises(TypeError):
        pack([*good, Task("odd", "Add.", {"tests/test_a.py": None})], str(tmp_path / "t.parquet"))
    with pytest.raises(ValueError, match="no task to pack"):
        pack([], str(tmp_path / "t.parquet"))
    assert load_tasks(str(tmp_path / "t.parquet")) == good
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_a_local_folder_reads_like_a_hub_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    made = generate("strings", "heldout", 5)
    (tmp_path / "set").mkdir()
    pack(made, str(tmp_path / "set" / "tasks.parquet"))
    found = tasks._packed_tasks("set", tasks._hub_rows(str(tmp_path / "set")))
    assert [tasks._read_task(*each) for each in found] == made


# --- bad input


def test_bad_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.parquet").write_text("path,task_binary\n")
    write_parquet(Path("columns.parquet"), [("a", "b")], ("path", "archive"))
    write_parquet(Path("types.parquet"), [("a", "text")])
    write_parquet(Path("null.parquet"), [("a", good_tar()), (None, good_tar())])
    write_parquet(Path("rows.parquet"), [])
    fails("missing", "missing: no such file or directory")
    fails("empty/missing", "empty/missing: no such file or directory")
    fails("a/b/missing.parquet", "a/b/missing.parquet: no such file or directory")
    fails("empty", "empty: holds no task")
    fails("text.parquet", "text.parquet: not a readable parquet file")
    fails("columns.parquet", "columns.parquet: no column task_binary; it has path, archive")
    fails("types.parquet", "types.parquet: row 0: path must be a string and task_binary bytes")
    fails("null.parquet", "null.parquet: row 1: path must be a string and task_binary bytes")
    fails("rows.parquet", "rows.parquet: holds no task")
    with pytest.raises(ValueError, match="limit is -1"):
        load_tasks("empty", limit=-1)


def test_bad_tasks(tmp_path):
    def without(name):
        return {key: value for key, value in GOOD.items() if key != name}

    blank, latin = GOOD | {"instruction.md": b" \n"}, GOOD | {"instruction.md": b"\xff"}
    fails(str(write_tree(tmp_path / "a", blank)), "a: instruction.md is missing or empty")
    fails(str(write_tree(tmp_path / "b", latin)), "b: instruction.md is not UTF-8 text")
    fails(str(write_tree(tmp_path / "c", without("tests/test_solution.py"))), "task 'c' has no test_*.py")
    write_tree(tmp_path / "d", GOOD)
    (tmp_path / "d" / "gone").symlink_to("nowhere")
    fails(str(tmp_path / "d"), "d: refused: 'gone' is no regular file")
    bare = tar(member("tests/test_a.py"))
    source = write_parquet(tmp_path / "t.parquet", [("ok", good_tar()), ("set/bare", bare)])
    fails(source, f"{source}: row 1 'set/bare': instruction.md is missing or empty")


def test_an_id_that_occurs_twice_names_both(tmp_path):
    rows = [("x/one", good_tar()), ("two", good_tar()), ("y/one", good_tar())]
    source = write_parquet(tmp_path / "t.parquet", rows)
    fails(source, "task id 'one' occurs twice", "row 0 'x/one'", "row 2 'y/one'")
    for place in ("x", "y"):
        write_tree(tmp_path / "set" / place / "one", GOOD)
    fails(str(tmp_path / "set"), "task id 'one' occurs twice", "x/one and ", "y/one")


@pytest.mark.parametrize("path", ["", "/", "..", "a/..", "a\nb", "a\0b", "."])
def test_paths_that_name_no_directory(tmp_path, path):
    source = write_parquet(tmp_path / "t.parquet", [(path, good_tar())])
    fails(source, "row 0", "cannot name a task directory")


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("generated:", "must be generated:FAMILY:SPLIT:COUNT"),
        ("generated:chains:train", "must be generated:FAMILY:SPLIT:COUNT"),
        ("generated:chains:train:many", "must be generated:FAMILY:SPLIT:COUNT"),
        ("generated:chains:train:0", "count is 0"),
        ("generated:trees:train:5", "unknown family 'trees'"),
        ("generated:chains:test:5", "unknown split 'test'"),
    ],
)
def test_bad_generated_sources(source, part):
    fails(source, source, part)


# --- archives that must be refused


def huge_gzip(size: int) -> bytes:
    """`size` zero bytes, a multiple of 16 MiB, as gzip."""
    return gzip.compress(bytes(16 * 2**20), compresslevel=1) * (size // (16 * 2**20))


def damaged(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :]


def negative_size() -> bytes:
    header = bytearray(member("extra")[0].tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 12  # base-256: -1
    header[148:156] = b"%06o\0 " % (256 + sum(header[:148]) + sum(header[156:]))
    return good_tar()[:2048] + bytes(header) + bytes(1024)


def chained_extensions() -> bytes:
    record = b"13 comment=ab\n".ljust(512, b"\0")
    header, _ = member("extra", record[:13], tarfile.XHDTYPE)
    return (header.tobuf(tarfile.USTAR_FORMAT) + record) * 5_000 + good_tar()


def holes() -> bytes:
    fields = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**33), "GNU.sparse.name": "x"}
    return good_tar(member("x", pax_headers=fields))


def of_kind(kind: bytes) -> bytes:
    return good_tar(member("x", kind=kind, linkname="task.toml"))


GZIP = gzip.compress(good_tar())
FILL = bytes(16 * 2**20)
REFUSED = {
    "absolute": (lambda: good_tar(member("/etc/cron")), "'/etc/cron' is no path inside the task"),
    "parent": (lambda: good_tar(member("../x")), "'../x' is no path inside the task"),
    "parent inside": (
        lambda: good_tar(member("tests/../../x")),
        "'tests/../../x' is no path inside the task",
    ),
    "absolute folder": (
        lambda: good_tar(member("/x", kind=tarfile.DIRTYPE)),
        "'/x' is no path inside the task",
    ),
    "symbolic link": (lambda: of_kind(tarfile.SYMTYPE), "'x' is a symbolic link"),
    "hard link": (lambda: of_kind(tarfile.LNKTYPE), "'x' is a hard link"),
    "fifo": (lambda: of_kind(tarfile.FIFOTYPE), "'x' is a fifo"),
    "character device": (lambda: of_kind(tarfile.CHRTYPE), "'x' is a character device"),
    "block device": (lambda: of_kind(tarfile.BLKTYPE), "'x' is a block device"),
    "unknown type": (lambda: of_kind(b"Q"), "'x' is a tar member of type b'Q'"),
    "no name": (lambda: good_tar(member("./.")), "'./.' is no path inside the task"),
    "duplicate": (lambda: good_tar(member("./instruction.md", b"Other.")), "'./instruction.md' occurs twice"),
    "file in a file": (
        lambda: good_tar(member("tests/test_solution.py/x/y")),
        "is both a file and a directory",
    ),
    "unprintable name": (lambda: good_tar(member("a\x1bb")), "'a\\x1bb' has unprintable characters"),
    "undecodable name": (lambda: good_tar(member("a\udcffb")), "has unprintable characters"),
    "too many files": (lambda: good_tar(*(member(f"x{i}") for i in range(999))), "more than 1000 files"),
    "too many directories": (
        lambda: good_tar(*(member(f"x{i}", kind=tarfile.DIRTYPE) for i in range(999))),
        "more than 1000 files and directories",
    ),
    "too large a file": (lambda: good_tar(member("x", FILL + b"1")), "'x' is larger than 16777216 bytes"),
    "too large together": (
        lambda: good_tar(*(member(f"x{i}", FILL) for i in range(4))),
        "larger than 67108864",
    ),
    "too large an archive": (lambda: gzip.compress(bytes(70 * 2**20), 1), "unpacks to more than"),
    "bomb": (lambda: GZIP + huge_gzip(2**30), "unpacks to more than"),
    "bomb with holes": (lambda: with_header(kind=tarfile.GNUTYPE_SPARSE, size=2**33), "type b'S'"),
    "bomb with holes (pax)": (holes, "'x' has holes"),
    "long extension": (
        lambda: good_tar(member("x", pax_headers={"a": "9" * 5_000})),
        "larger than 4096 bytes",
    ),
    "long GNU name": (lambda: tar(member("x" * 5_000), format=tarfile.GNU_FORMAT), "larger than 4096 bytes"),
    "chained extensions": (chained_extensions, "recursion"),
    "negative size": (negative_size, "'extra' has a negative size"),
    "claims more than it has": (lambda: with_header(size=10_000), "unexpected end of data"),
    "truncated gzip": (lambda: GZIP[:-20], "end-of-stream marker"),
    "damaged gzip": (lambda: damaged(GZIP, len(GZIP) - 8), "CRC check failed"),
    "damaged header": (lambda: damaged(good_tar(), 1024 + 3), "broken tar header (bad checksum)"),
    "truncated tar": (lambda: good_tar()[:1024], "broken tar header"),
    "truncated data": (lambda: good_tar()[:1540], "unexpected end of data"),
    "not a tar": (lambda: b"PK\x03\x04" * 1_000, "broken tar header"),
    "gzip of no tar": (lambda: gzip.compress(b"PK\x03\x04" * 1_000), "broken tar header"),
    "empty": (lambda: b"", "broken tar header (empty header)"),
    "gzip of nothing": (lambda: gzip.compress(b""), "broken tar header (empty header)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsafe_and_broken_archives_are_refused_whole(tmp_path, name):
    build, reason = REFUSED[name]
    source = write_parquet(tmp_path / "t.parquet", [("set/fine", good_tar()), ("set/odd", build())])
    fails(source, f"{source}: row 1 'set/odd': refused: ", reason)
    assert [task.id for task in load_tasks(source, limit=1)] == ["fine"]


def test_the_limits_themselves_are_allowed(tmp_path):
    many = good_tar(*(member(f"x{i}") for i in range(998)))
    large = good_tar(*(member(f"x{i}", FILL) for i in range(3)))
    rows = [("many", many), ("large", gzip.compress(large, 1))]
    loaded = load_tasks(write_parquet(tmp_path / "t.parquet", rows))
    assert [len(task.files) for task in loaded] == [999, 4]


def test_a_bomb_is_not_expanded():
    bomb = GZIP + huge_gzip(2**30)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="unpacks to more than"):
            list(archives.archive_entries(bomb))
        assert tracemalloc.get_traced_memory()[1] < 2 * archives.MAX_ARCHIVE
    finally:
        tracemalloc.stop()


# --- the generator

# Operation, constant, argument and result, worked by hand.
WORKED = {
    "chains": [
        ("add", 3, 2, 5),
        ("subtract", 3, 2, -1),
        ("multiply", 4, -3, -12),
        ("double", None, -4, -8),
        ("negate", None, 7, -7),
        ("square", None, -6, 36),
        ("absolute", None, -9, 9),
        ("modulo", 5, -7, 3),
        ("halve", None, -5, -3),
        ("maximum", 4, -2, 4),
        ("minimum", 4, 9, 4),
    ],
    "strings": [
        ("reverse", None, "abC", "Cba"),
        ("upper", None, "aBc", "ABC"),
        ("lower", None, "aBC", "abc"),
        ("swap_case", None, "aBc", "AbC"),
        ("drop_first", None, "abc", "bc"),
        ("drop_last", None, "abc", "ab"),
        ("keep_first", 2, "abc", "ab"),
        ("every_second", None, "abcde", "ace"),
        ("twice", None, "ab", "abab"),
        ("append", "n", "ab", "abn"),
        ("prepend", "n", "ab", "nab"),
        ("mask", "a", "banA", "b-nA"),
        ("remove", "n", "nonE", "oE"),
        ("sort", None, "baCa", "Caab"),
    ],
    "lists": [
        ("sort", None, [3, -1, 2], [-1, 2, 3]),
        ("sort_down", None, [3, -1, 5], [5, 3, -1]),
        ("reverse", None, [1, 2, 3], [3, 2, 1]),
        ("drop_first", None, [1, 2, 3], [2, 3]),
        ("drop_last", None, [1, 2, 3], [1, 2]),
        ("keep_first", 2, [1, 2, 3], [1, 2]),
        ("add", 4, [1, -2], [5, 2]),
        ("multiply", 3, [1, -2], [3, -6]),
        ("negate", None, [1, -2], [-1, 2]),
        ("square", None, [3, -2], [9, 4]),
        ("absolute", None, [3, -2], [3, 2]),
        ("keep_even", None, [1, 2, -4, -3, 0], [2, -4, 0]),
        ("keep_odd", None, [1, 2, -4, -3, 0], [1, -3]),
        ("keep_above", -1, [3, -1, 0, -2], [3, 0]),
        ("unique", None, [2, 1, 2, 3, 1], [2, 1, 3]),
        ("append", 7, [1], [1, 7]),
        ("append_length", None, [4, 4], [4, 4, 2]),
        ("twice", None, [1, 2], [1, 2, 1, 2]),
    ],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_by_hand(family):
    assert [name for name, *_ in WORKED[family]] == list(FAMILIES[family].operations)
    for name, k, x, y in WORKED[family]:
        assert k in FAMILIES[family].operations[name].constants
        for style in ("one_liner", "steps"):
            solve = names_of(write_solution(family, [(name, k)], style))["solve"]
            assert solve(x) == y, (name, style)


def test_instruction_tests_and_metadata_have_this_shape():
    chain = [("add", 3), ("square", None)]
    task = generator._write_task("p", "train", 3, "chains", chain, [2, -5, 1, 0], [25, 4, 16, 9])
    assert task.instruction == (
        "Complete this function.\n\n"
        "def solve(x: int) -> int:\n"
        '    """Take x, add 3, then square it.\n\n'
        "    >>> solve(2)\n    25\n"
        "    >>> solve(-5)\n    4\n"
        '    """\n'
    )
    assert task.files["tests/test_solution.py"] == (
        b"from solution import solve\n\n\n"
        b"def test_0():\n    assert solve(1) == 16\n\n\n"
        b"def test_1():\n    assert solve(0) == 9\n"
    )
    assert task.files["metadata.json"] == (
        b'{"family": "chains", "operations": [["add", 3], ["square", null]], "split": "train", "seed": 3}\n'
    )
    assert operations(task) == ("chains", [("add", 3), ("square", None)])
    assert sorted(task.files) == [
        "environment/Dockerfile",
        "metadata.json",
        "solution/solution.py",
        "task.toml",
        "tests/test.sh",
        "tests/test_solution.py",
    ]


def test_solution_styles():
    chain = [("add", 3), ("square", None), ("negate", None)]
    assert write_solution("chains", chain, "one_liner") == (
        "def solve(x: int) -> int:\n    return -((x + 3) ** 2)\n"
    )
    steps = (
        "def solve(x: int) -> int:\n"
        "    # add 3\n    x = x + 3\n"
        "    # square it\n    x = x ** 2\n"
        "    # negate it\n    x = -x\n"
        "    return x\n"
    )
    assert write_solution("chains", chain, "steps") == steps
    text = write_solution("chains", chain, "padded", random.Random(5))
    assert text == write_solution("chains", chain, "padded", random.Random(5))
    padding = [f"    # {line}\n" for line in generator.PADDING]
    assert "".join(line for line in text.splitlines(keepends=True) if line not in padding) == steps
    texts = [write_solution("chains", chain[:1], "padded", random.Random(seed)) for seed in range(100)]
    assert {text.count("\n") - 4 for text in texts} == {0, 1, 2, 3, 4}


def test_what_write_solution_and_operations_refuse():
    with pytest.raises(ValueError, match="unknown family 'trees'"):
        write_solution("trees", [], "steps")
    with pytest.raises(ValueError, match="unknown style 'loop'"):
        write_solution("chains", [("add", 3)], "loop")
    with pytest.raises(ValueError, match="rng"):
        write_solution("chains", [("add", 3)], "padded")
    unknown = b'{"family": "chains", "operations": [["cube", null]]}'
    for metadata in (b"", b"[]", b"{}", b'{"family": [], "operations": [["add", 3]]}', unknown):
        with pytest.raises(ValueError, match="task 'hand' is not generated"):
            operations(Task("hand", "Add.", {"metadata.json": metadata}))
    with pytest.raises(ValueError, match="task 'hand' is not generated"):
        operations(Task("hand", "Add.", {}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", SPLITS)
def test_references_and_all_styles_pass_the_hidden_tests(family, split):
    rng = random.Random(0)
    for task in generate(family, split, 150):
        assert count_passed(task, task.files["solution/solution.py"].decode()) == 5
        for style in ("one_liner", "steps", "padded"):
            assert count_passed(task, write_solution(*operations(task), style, rng)) == 5, (task.id, style)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_solutions_fail_the_hidden_tests(family):
    for task in generate(family, "heldout", 100):
        _, chain = operations(task)
        assert count_passed(task, "def solve(x):\n    return x\n") < 5
        assert count_passed(task, "def solve(x):\n    return None\n") == 0
        for constant in (0, 1, "''", [[]]):
            assert count_passed(task, f"def solve(x):\n    return {constant}\n") <= 3
        for left_out in range(len(chain)):
            shorter = chain[:left_out] + chain[left_out + 1 :]
            assert count_passed(task, write_solution(family, shorter, "steps")) < 5, task.id


@pytest.mark.parametrize("family", FAMILIES)
def test_examples_are_true_and_hidden_inputs_are_others(family):
    for task in generate(family, "train", 150):
        function = ast.parse(task.instruction.split("\n\n", 1)[1]).body[0]
        names = names_of(task.files["solution/solution.py"].decode())
        text = ast.get_docstring(function)
        examples = doctest.DocTestParser().get_doctest(text, names, task.id, None, None)
        assert doctest.DocTestRunner().run(examples) == (0, 2)
        shown = [ast.parse(example.source).body[0].value for example in examples.examples]
        hidden = [
            node
            for node in ast.walk(ast.parse(task.files["tests/test_solution.py"]))
            if isinstance(node, ast.Call) and node.func.id == "solve"
        ]
        inputs = [repr(ast.literal_eval(call.args[0])) for call in shown + hidden]
        assert len(hidden) == 5 and len(set(inputs)) == 7


@pytest.mark.parametrize("family", FAMILIES)
def test_values_stay_small(family):
    for task in generate(family, "warmstart", 300):
        assert len(task.instruction) < 400
        for line in task.files["tests/test_solution.py"].decode().splitlines():
            assert len(line) < 250
            if "assert" in line and family != "strings":
                nodes = ast.walk(ast.parse(line.strip()))
                assert all(node.value <= 10**6 for node in nodes if isinstance(node, ast.Constant))


@pytest.mark.parametrize("family", [*FAMILIES, "mixed"])
def test_splits_are_disjoint_whatever_count_and_seed(family):
    chains: dict[str, set] = {split: set() for split in SPLITS}
    for split in SPLITS:
        for count, seed in ((400, 0), (200, 1)):
            found = map(operations, generate(family, split, count, seed))
            made = [(kind, tuple(chain)) for kind, chain in found]
            assert len(set(made)) == count
            assert all(split_of(kind, list(chain)) == split for kind, chain in made)
            assert {kind for kind, _ in made} == (set(FAMILIES) if family == "mixed" else {family})
            assert {len(chain) for _, chain in made} == {2, 3, 4, 5}
            chains[split] |= set(made)
    assert not chains["warmstart"] & chains["train"]
    assert not chains["warmstart"] & chains["heldout"]
    assert not chains["train"] & chains["heldout"]


def test_shares_of_the_splits():
    rng = random.Random(0)
    splits = [split_of("chains", [("add", rng.random()), ("square", None)]) for _ in range(20_000)]
    for split, share in (("warmstart", 0.45), ("train", 0.45), ("heldout", 0.10)):
        assert splits.count(split) / 20_000 == pytest.approx(share, abs=0.012)  # over 3 standard errors


def test_no_chain_has_neighbours_that_cancel():
    # Twice is once, or twice is never.
    idle = {"absolute", "sort", "sort_down", "upper", "lower", "unique", "keep_even", "keep_odd"}
    idle |= {"negate", "reverse", "swap_case"}
    same = {
        "maximum",
        "minimum",
        "modulo",
        "mask",
        "remove",
        "keep_first",
        "keep_above",
    }  # with equal constants
    opposite = {("add", "subtract"), ("subtract", "add")}
    for family in FAMILIES:
        for _, chain in map(operations, generate(family, "train", 1_000)):
            for (name, k), (after, k_after) in pairwise(chain):
                assert name != after or name not in idle, chain
                assert k != k_after or not (name == after and name in same), chain
                assert k != k_after or (name, after) not in opposite, chain


def test_a_task_depends_on_its_chain_alone():
    solution = "solution/solution.py"
    first = {task.files[solution]: task for task in generate("strings", "train", 1_200, seed=0)}
    second = generate("strings", "train", 1_200, seed=1)
    shared = [task for task in second if task.files[solution] in first]
    assert len(shared) > 25
    for task in shared:
        twin = first[task.files[solution]]
        assert task.instruction == twin.instruction
        assert task.files["tests/test_solution.py"] == twin.files["tests/test_solution.py"]
        assert task.id[-8:] == twin.id[-8:]


def test_larger_counts_only_add_and_order_survives_a_directory():
    many = generate("mixed", "train", 120)
    assert generate("mixed", "train", 50) == many[:50]
    assert load_tasks("generated:mixed:train:120") == many
    assert load_tasks("generated:mixed:train:120", limit=7) == many[:7]
    assert [task.id for task in many] == sorted({task.id for task in many})
    assert generate("chains", "train", 5, seed=1) != generate("chains", "train", 5, seed=0)


def test_lengths_are_kept_and_too_many_tasks_are_an_error():
    assert {len(operations(task)[1]) for task in generate("lists", "train", 40, min_ops=4, max_ops=4)} == {4}
    with pytest.raises(ValueError, match=r"found only \d+ heldout tasks of chains with 1 to 1 operations"):
        generate("chains", "heldout", 50, min_ops=1, max_ops=1)
    with pytest.raises(ValueError, match="min_ops 3 and max_ops 2"):
        generate("chains", "train", 1, min_ops=3, max_ops=2)


def test_no_other_constant_passes_the_hidden_tests():
    # "take the minimum with 5, add 6, negate it, then halve it" once let a minimum with 6 pass: -11 // 2 == -12 // 2
    for task in generate("mixed", "train", 12):
        family, chain = operations(task)
        tests = task.files["tests/test_solution.py"].decode().replace("from solution import solve\n", "")
        for i, (name, k) in enumerate(chain):
            for other in FAMILIES[family].operations[name].constants:
                wrong = [*chain[:i], (name, other), *chain[i + 1:]]
                scope = {}
                exec(write_solution(family, wrong, "steps") + tests, scope)
                failures = 0
                for number in range(5):
                    try:
                        scope[f"test_{number}"]()
                    except AssertionError:
                        failures += 1
                assert (failures > 0) == (other != k)


def test_the_generated_set_is_pinned():
    digest = hashlib.sha256()
    for family in (*FAMILIES, "mixed"):
        for split in SPLITS:
            for task in generate(family, split, 100):
                digest.update(repr((task.id, task.instruction, sorted(task.files.items()))).encode())
    assert digest.hexdigest() == "520f241ca2acd8a56e8eeabddb21c8f91bb22e1c7e6421998ba217113b1a614b"


def test_a_thousand_tasks_take_two_seconds_at_most():
    start = time.process_time()
    generate("mixed", "heldout", 1_000)
    assert time.process_time() - start < 2


# --- the command line


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "tasks.py"), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_command_line(tmp_path):
    packed, folder = str(tmp_path / "t.parquet"), str(tmp_path / "out")
    done = run("pack", "generated:chains:heldout:12", packed)
    assert (done.returncode, done.stdout) == (0, f"12 tasks packed into {packed}\n")
    done = run("unpack", packed, folder)
    assert (done.returncode, done.stdout) == (0, f"12 tasks unpacked into {folder}\n")
    done = run("list", folder)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert [line.split() for line in lines] == [
        [task.id, "2", "Complete", "this", "function."] for task in generate("chains", "heldout", 12)
    ]
    for arguments, part in (
        (("unpack", packed, folder), "exists already, nothing is overwritten"),
        (("list", "generated:chains:heldout"), "must be generated:FAMILY:SPLIT:COUNT"),
        (("pack", packed, str(tmp_path / "no" / "t.parquet")), "No such file or directory"),
        (("list", "nobody/nothing"), "nobody/nothing: no such path, and not read from the Hub"),
    ):
        done = run(*arguments, HF_HUB_OFFLINE="1")
        assert done.returncode == 2
        assert done.stdout == "" and done.stderr.count("\n") == 1
        assert done.stderr.startswith("tasks.py: ") and part in done.stderr
    done = run("--help")
    assert done.returncode == 0 and "python tasks.py verify generated:chains:train:320" in done.stdout


@pytest.mark.slow
def test_five_thousand_packed_tasks_load_fast_and_small(tmp_path):
    packed = str(tmp_path / "t.parquet")
    made = generate("mixed", "train", 500)
    pack([replace(task, id=f"{task.id}-{copy}") for copy in range(10) for task in made], packed)
    code = (
        "import sys, time, tasks\n"
        "start = time.process_time()\n"  # a busy machine does not count
        "count = len(tasks.load_tasks(sys.argv[1]))\n"
        "seconds = time.process_time() - start\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(count, seconds, int(peak.split()[1]) * 1024)\n"  # ru_maxrss would be that of whoever forked it
    )
    done = subprocess.run(
        [sys.executable, "-c", code, packed],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    count, seconds, memory = map(float, done.stdout.split())
    assert count == 5_000
    assert seconds < 10
    assert memory < 1e9
