"""Small function tasks that a tiny model can learn, made from a table of operations.

A task is a chain of 2 to 5 operations of one family, described in words, with two examples to read and five hidden
tests. A hash of the chain decides its split: warm start, training and held-out tasks never share a chain, whatever
the count or seed. `write_solution` renders a chain in the styles that a policy may choose between.

Leaves out: tasks whose difficulty is in anything but the number of operations.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from archives import Task

SPLITS = ("warmstart", "train", "heldout")

Chain = list[tuple[str, int | str | None]]  # operations in order: name, constant (None: it takes none)


@dataclass(frozen=True)
class Operation:
    phrase: str  # as the instruction says it; {k} is the constant
    template: str  # Python expression of the value {x} and the constant {k}
    constants: tuple = (None,)  # one is drawn


@dataclass(frozen=True)
class Family:
    type: str  # annotation of argument and result
    inputs: Callable[[random.Random], list]  # seven different arguments: two for the examples, five hidden
    small: Callable[[Any], bool]  # whether a value, on the way or at the end, is small enough to read
    operations: dict[str, Operation]


LETTERS = "aeioubdlmnrstAEBN"


def _integers(rng: random.Random) -> list[int]:
    a, b, c = rng.sample(range(1, 10), 3)
    return [a, rng.choice((b, -b)), rng.randint(10, 14), -c, rng.randint(15, 20), -rng.randint(10, 20), 0]


def _strings(rng: random.Random) -> list[str]:
    *words, left, right = ("".join(rng.choices(LETTERS, k=length)) for length in (3, 4, 5, 6, 1, 3, 4))
    return [*words, f"{left} {right}", ""]


def _lists(rng: random.Random) -> list[list[int]]:
    values = [rng.choices(range(-9, 10), k=length) for length in (3, 4, 5, 6, 1)]
    return [*values, values[3] + values[3][:1], []]


FAMILIES = {
    "chains": Family(
        "int",
        _integers,
        lambda value: abs(value) <= 10**6,
        {
            "add": Operation("add {k}", "{x} + {k}", tuple(range(1, 10))),
            "subtract": Operation("subtract {k}", "{x} - {k}", tuple(range(1, 10))),
            # Not by 2: that would be "double" under another name, and the splits would share its chains.
            "multiply": Operation("multiply by {k}", "{x} * {k}", (3, 4, 5)),
            "double": Operation("double it", "{x} * 2"),
            "negate": Operation("negate it", "-{x}"),
            "square": Operation("square it", "{x} ** 2"),
            "absolute": Operation("take the absolute value", "abs({x})"),
            "modulo": Operation("take the remainder modulo {k}", "{x} % {k}", tuple(range(3, 10))),
            "halve": Operation("halve it rounding down", "{x} // 2"),
            "maximum": Operation("take the maximum with {k}", "max({x}, {k})", tuple(range(10))),
            "minimum": Operation("take the minimum with {k}", "min({x}, {k})", tuple(range(10))),
        },
    ),
    "strings": Family(
        "str",
        _strings,
        lambda value: len(value) <= 40,
        {
            "reverse": Operation("reverse it", "{x}[::-1]"),
            "upper": Operation("make it upper case", "{x}.upper()"),
            "lower": Operation("make it lower case", "{x}.lower()"),
            "swap_case": Operation("swap its case", "{x}.swapcase()"),
            "drop_first": Operation("drop the first character", "{x}[1:]"),
            "drop_last": Operation("drop the last character", "{x}[:-1]"),
            "keep_first": Operation("keep the first {k} characters", "{x}[:{k}]", (2, 3, 4)),
            "every_second": Operation("keep every second character", "{x}[::2]"),
            "twice": Operation("write it twice", "{x} * 2"),
            "append": Operation("append {k}", "{x} + {k}", tuple("abdeino")),
            "prepend": Operation("prepend {k}", "{k} + {x}", tuple("abdeino")),
            "mask": Operation("replace every {k} with '-'", "{x}.replace({k}, '-')", tuple("aeiou")),
            "remove": Operation("remove every {k}", "{x}.replace({k}, '')", tuple("aeioudlnrst")),
            "sort": Operation("sort its characters", "''.join(sorted({x}))"),
        },
    ),
    "lists": Family(
        "list[int]",
        _lists,
        lambda value: len(value) <= 16 and all(abs(item) <= 10**6 for item in value),
        {
            "sort": Operation("sort it", "sorted({x})"),
            "sort_down": Operation("sort it from large to small", "sorted({x}, reverse=True)"),
            "reverse": Operation("reverse it", "{x}[::-1]"),
            "drop_first": Operation("drop the first item", "{x}[1:]"),
            "drop_last": Operation("drop the last item", "{x}[:-1]"),
            "keep_first": Operation("keep the first {k} items", "{x}[:{k}]", (2, 3, 4)),
            "add": Operation("add {k} to each", "[v + {k} for v in {x}]", tuple(range(1, 10))),
            "multiply": Operation("multiply each by {k}", "[v * {k} for v in {x}]", (2, 3, 4, 5)),
            "negate": Operation("negate each", "[-v for v in {x}]"),
            "square": Operation("square each", "[v * v for v in {x}]"),
            "absolute": Operation("take the absolute value of each", "[abs(v) for v in {x}]"),
            "keep_even": Operation("keep the even items", "[v for v in {x} if v % 2 == 0]"),
            "keep_odd": Operation("keep the odd items", "[v for v in {x} if v % 2 == 1]"),
            "keep_above": Operation(
                "keep the items above {k}", "[v for v in {x} if v > {k}]", tuple(range(-3, 4))
            ),
            "unique": Operation("drop repeated items", "list(dict.fromkeys({x}))"),
            "append": Operation("append {k}", "{x} + [{k}]", tuple(range(10))),
            "append_length": Operation("append the length", "{x} + [len({x})]"),
            "twice": Operation("write it twice", "{x} * 2"),
        },
    ),
}

FUNCTIONS = {
    (family, name): eval(f"lambda x, k: {operation.template.format(x='x', k='k')}")
    for family, table in FAMILIES.items()
    for name, operation in table.operations.items()
}

TEST_SH = """\
#!/bin/bash
# Reward 1 when every test passes, else 0.
finish() {
    if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
}
mkdir -p /logs/verifier
trap finish EXIT
set -e
export PYTHONPATH=/app
python -m pytest -v /tests/test_solution.py
"""
TASK_TOML = """\
version = "1.0"

[metadata]
category = "functions"

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 900.0
"""
DOCKERFILE = """\
FROM python:3.10-slim
WORKDIR /app
RUN pip install --no-cache-dir pytest
"""
PADDING = (
    "keep going",
    "this part is simple",
    "nothing else changes here",
    "the order matters",
    "one thing at a time",
    "now the next part",
    "this follows the text",
    "no special case is needed",
)


def generate(
    family: str, split: str, count: int, seed: int = 0, min_ops: int = 2, max_ops: int = 5
) -> list[Task]:
    """`count` different tasks of a family ("mixed": of all families in turn); a larger count only adds tasks.

    A task's tests depend on its chain alone, not on the seed. Raises ValueError for unknown names and when
    there are not `count` chains of `min_ops` to `max_ops` operations.
    """
    if family not in FAMILIES and family != "mixed":
        raise ValueError(f"unknown family {family!r}, must be one of {', '.join(FAMILIES)}, mixed")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, must be one of {', '.join(SPLITS)}")
    if count < 1:
        raise ValueError(f"count is {count}, must be 1 or more")
    if not 1 <= min_ops <= max_ops:
        raise ValueError(f"min_ops {min_ops} and max_ops {max_ops}: must be 1 <= min_ops <= max_ops")
    names = list(FAMILIES) if family == "mixed" else [family]
    streams = [_draw_chains(name, split, seed, min_ops, max_ops) for name in names]
    return [
        _write_task(f"{family}-{split}-{index:06d}", split, seed, *next(streams[index % len(streams)]))
        for index in range(count)
    ]


def _canonical(family: str, chain: Chain) -> str:
    return " ".join([family, *(name if k is None else f"{name}:{k}" for name, k in chain)])


def _digest(family: str, chain: Chain) -> str:
    return hashlib.sha256(_canonical(family, chain).encode()).hexdigest()


def split_of(family: str, chain: Chain) -> str:
    """45 % warmstart, 45 % train, 10 % heldout, by a hash of the operations and their constants."""
    share = int(_digest(family, chain)[:8], 16) % 100
    return "warmstart" if share < 45 else "train" if share < 90 else "heldout"


def _draw_chains(
    family: str, split: str, seed: int, min_ops: int, max_ops: int
) -> Iterator[tuple[str, Chain, list, list]]:
    """Endless different chains of a split, with their inputs and results."""
    rng = random.Random(f"{family} {seed}")
    table = FAMILIES[family].operations
    seen: set[str] = set()
    found = misses = 0
    while misses < 20_000:
        misses += 1
        names = rng.choices(list(table), k=rng.randint(min_ops, max_ops))
        chain = [(name, rng.choice(table[name].constants)) for name in names]
        if split_of(family, chain) != split or _canonical(family, chain) in seen:
            continue
        seen.add(_canonical(family, chain))
        inputs = FAMILIES[family].inputs(random.Random(_canonical(family, chain)))
        results = [_apply(family, chain, x) for x in inputs]
        if _is_sharp(family, chain, inputs, results):
            yield family, chain, inputs, results
            found += 1
            misses = 0
    raise ValueError(f"found only {found} {split} tasks of {family} with {min_ops} to {max_ops} operations")


def _apply(family: str, chain: Chain, x: Any) -> Any:
    """The chain's value at x; None as soon as a value grows too large."""
    for name, k in chain:
        x = FUNCTIONS[family, name](x, k)
        if not FAMILIES[family].small(x):
            return None
    return x


def _is_sharp(family: str, chain: Chain, inputs: list, results: list) -> bool:
    """Whether values stay small and the hidden tests notice each part that is left out and each wrong constant.

    This drops chains with idle parts (negate twice, sort twice, the absolute value of a square).
    """
    if any(result is None for result in results) or len({repr(result) for result in results[2:]}) < 3:
        return False
    n = len(chain)
    wrong = [chain[:start] + chain[stop:] for start in range(n) for stop in range(start + 1, n + 1)]
    for i, (name, k) in enumerate(chain):
        others = FAMILIES[family].operations[name].constants
        wrong += [[*chain[:i], (name, other), *chain[i + 1:]] for other in others if other != k]
    return not any(all(_apply(family, each, x) == result for x, result in zip(inputs[2:], results[2:]))
                   for each in wrong)


def _write_task(
    prefix: str, split: str, seed: int, family: str, chain: Chain, inputs: list, results: list
) -> Task:
    steps = [FAMILIES[family].operations[name].phrase.format(k=repr(k)) for name, k in chain]
    examples = "".join(f"    >>> solve({x!r})\n    {y!r}\n" for x, y in zip(inputs[:2], results[:2]))
    instruction = (
        f"Complete this function.\n\n{_def_line(family)}"
        f'    """Take x, {", ".join([*steps[:-1], f"then {steps[-1]}"])}.\n\n{examples}    """\n'
    )
    hidden = "".join(
        f"\n\ndef test_{number}():\n    assert solve({x!r}) == {y!r}\n"
        for number, (x, y) in enumerate(zip(inputs[2:], results[2:]))
    )
    metadata = {"family": family, "operations": chain, "split": split, "seed": seed}
    texts = {
        "environment/Dockerfile": DOCKERFILE,
        "metadata.json": json.dumps(metadata) + "\n",
        "solution/solution.py": write_solution(family, chain, "steps"),
        "task.toml": TASK_TOML,
        "tests/test.sh": TEST_SH,
        "tests/test_solution.py": "from solution import solve\n" + hidden,
    }
    id = f"{prefix}-{_digest(family, chain)[:8]}"
    return Task(id, instruction, {path: text.encode() for path, text in texts.items()})


def _def_line(family: str) -> str:
    kind = FAMILIES[family].type
    return f"def solve(x: {kind}) -> {kind}:\n"


def operations(task: Task) -> tuple[str, Chain]:
    """Family and chain of a generated task, for `write_solution`. Raises ValueError for any other task."""
    try:
        metadata = json.loads(task.files["metadata.json"])
        family, chain = metadata["family"], [(name, k) for name, k in metadata["operations"]]
        known = all(name in FAMILIES[family].operations for name, _ in chain)
    except (KeyError, TypeError, ValueError):
        known = False
    if not known:
        raise ValueError(f"task {task.id!r} is not generated: its metadata.json names no known operations")
    return family, chain


def write_solution(family: str, operations: Chain, style: str, rng: random.Random | None = None) -> str:
    """Source text of `solve` for a chain, from the def line on.

    "one_liner": one nested expression; what an operation works on is in parentheses unless it is x itself.
    "steps": a comment and an assignment for each operation, then `return x`.
    "padded": steps, with 0 to 4 comments that say nothing, drawn from `rng`, before each assignment.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}, must be one of {', '.join(FAMILIES)}")
    if style not in ("one_liner", "steps", "padded"):
        raise ValueError(f"unknown style {style!r}, must be one_liner, steps or padded")
    if style == "padded" and rng is None:
        raise ValueError("style 'padded' draws its comments from an rng, none was given")
    expression = "x"
    lines = []
    for name, k in operations:
        operation = FAMILIES[family].operations[name]
        inner = expression if expression == "x" else f"({expression})"
        expression = operation.template.format(x=inner, k=repr(k))
        lines.append(f"    # {operation.phrase.format(k=repr(k))}\n")
        if style == "padded":
            lines += [f"    # {text}\n" for text in rng.choices(PADDING, k=rng.randint(0, 4))]
        lines.append(f"    x = {operation.template.format(x='x', k=repr(k))}\n")
    if style == "one_liner":
        return f"{_def_line(family)}    return {expression}\n"
    return _def_line(family) + "".join(lines) + "    return x\n"
