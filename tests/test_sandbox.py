"""sandbox.py: the six outcomes, what crosses the wire, and samples of each way to cheat or to break it."""
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import sandbox
from sandbox_wire import Broken, Unplain, Wire, rebuild, send_frame

ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = """
from solution import add

def test_one():
    assert add(2, 3) == 5

def test_two():
    assert add("x", "y") == "xy"
"""


@dataclass
class Task:
    id: str
    files: dict[str, bytes] = field(default_factory=dict)


def task(name: str, tests: str, reference: str | None = None) -> Task:
    files = {"tests/test_solution.py": tests.encode(), "task.toml": b"version = '1.0'"}
    return Task(name, files | ({} if reference is None else {"solution/solution.py": reference.encode()}))


@pytest.fixture(scope="module")
def box():
    with sandbox.Sandbox(workers=2, timeout_s=2.0, memory_mb=256) as made:
        yield made


def grade(box, code: str, tests: str = ADD_TESTS, reference: str = ADD, name: str = "") -> sandbox.Verdict:
    return box.grade(task(name or f"{hash((tests, reference))}", tests, reference), {"solution.py": code})


def descendants() -> list[str]:
    """The command lines of this process's descendants, zombies included."""
    found, queue = [], [os.getpid()]
    while queue:
        for thread in os.listdir(f"/proc/{queue[0]}/task"):
            try:
                with open(f"/proc/{queue[0]}/task/{thread}/children") as file:
                    children = [int(pid) for pid in file.read().split()]
            except OSError:
                continue
            found += [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
            queue += children
        queue.pop(0)
    return found


# ---- outcomes ----

def test_passed(box):
    verdict = grade(box, ADD)
    assert (verdict.outcome, verdict.reward, verdict.passed, verdict.total) == ("passed", 1.0, 2, 2)
    assert verdict.tests == {"tests/test_solution.py::test_one": "passed",
                             "tests/test_solution.py::test_two": "passed"}
    assert verdict.output == "" and 0 < verdict.seconds < 2


def test_failed_names_the_test_and_its_line(box):
    verdict = grade(box, "def add(a, b):\n    print('hello', a)\n    return 5\n")
    assert (verdict.outcome, verdict.reward, verdict.passed, verdict.total) == ("failed", 0.0, 1, 2)
    assert verdict.output == ("hello 2\nhello x\ntests/test_solution.py::test_two: AssertionError "
                              "(test_solution.py:8: assert add(\"x\", \"y\") == \"xy\")")
    assert verdict.tests["tests/test_solution.py::test_two"] == "failed"


@pytest.mark.parametrize("code", [
    "def add(a, b:\n", "import no_such_module\n", "1 / 0\n", "raise SystemExit\n", "raise GeneratorExit\n",
    "import os\nos._exit(0)\n"])
def test_error_when_it_does_not_import(box, code):
    verdict = grade(box, code + ADD)
    assert (verdict.outcome, verdict.reward) == ("error", 0.0)
    assert set(verdict.tests.values()) == {"missing"}


def test_error_when_it_writes_to_the_wire(box):
    verdict = grade(box, "import os\ndef add(a, b):\n    os.write(3, b'\\x05\\0\\0\\0hello')\n")
    assert verdict.outcome == "error" and "protocol" in verdict.output


def test_timeout(box):
    verdict = grade(box, "def add(a, b):\n    print('begun', flush=True)\n    while True: pass\n")
    assert (verdict.outcome, verdict.reward) == ("timeout", 0.0)
    assert verdict.output == "begun\nstopped after 2 s" and 2 <= verdict.seconds < 3


def test_oom_by_memory_error(box):
    verdict = grade(box, "def add(a, b):\n    return len(bytearray(1 << 30))\n")
    assert (verdict.outcome, verdict.reward) == ("oom", 0.0)


def test_oom_by_many_processes(box):
    code = """
import os, time
def add(a, b):
    for _ in range(8):
        if os.fork() == 0:
            hoard = bytearray(b"x") * (60 << 20)
            time.sleep(60)
    time.sleep(60)
"""
    verdict = grade(box, code)
    assert (verdict.outcome, verdict.reward) == ("oom", 0.0)


def test_infra_when_the_reference_is_wrong(box):
    verdict = grade(box, ADD, reference="def add(a, b):\n    return 5\n", name="crooked")
    assert (verdict.outcome, verdict.reward, verdict.tests) == ("infra", None, {})
    assert "crooked" in verdict.output and "test_two" in verdict.output


def test_infra_is_retried_on_a_fresh_worker():
    with sandbox.Sandbox(1, timeout_s=5) as box:
        assert grade(box, ADD).outcome == "passed"
        worker = box.pool.idle.get()
        worker.judge.process.kill()
        box.pool.idle.put(worker)
        assert grade(box, ADD).outcome == "passed"
        fresh = box.pool.idle.get()
        box.pool.idle.put(fresh)
        assert fresh is not worker


def test_infra_after_the_last_retry():
    with sandbox.Sandbox(1, timeout_s=5, retries=0) as box:
        assert grade(box, ADD).outcome == "passed"
        worker = box.pool.idle.get()
        box.pool.idle.put(worker)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(grade, box, "import time\ntime.sleep(4)\n" + ADD)
            time.sleep(0.5)
            worker.judge.process.kill()
            verdict = running.result()
        assert (verdict.outcome, verdict.reward) == ("infra", None)
        assert grade(box, ADD).outcome == "passed"


def test_pass_ratio():
    with sandbox.Sandbox(1, timeout_s=1, reward="pass_ratio") as box:
        assert grade(box, "def add(a, b):\n    return 5\n").reward == 0.5
        assert grade(box, ADD).reward == 1.0
        assert grade(box, "1 / 0").reward == 0.0


# ---- tasks ----

def test_no_tests(box):
    for files in ({}, {"tests/data.txt": b"exit 0"}):
        with pytest.raises(ValueError, match="task nothing"):
            box.grade(Task("nothing", files), {"solution.py": ADD})


def test_paths_stay_below_app(box):
    for name in ("/etc/x", "../x", "a/../../x", "", "a\0b"):
        with pytest.raises(ValueError, match="task t"):
            box.grade(task("t", ADD_TESTS, ADD), {name: ""})


def test_reference_by_another_name_and_helper_modules(box):
    files = {"tests/test_solution.py": ADD_TESTS.encode(), "solution/answer.py": ADD.encode()}
    code = {"solution.py": "from pack.helper import add\n", "pack/helper.py": ADD}
    assert box.grade(Task("named", files), code).outcome == "passed"


def test_without_reference_the_tests_themselves_say_what_to_expect(box):
    bare = task("no reference", ADD_TESTS)
    assert box.grade(bare, {"solution.py": ADD}).outcome == "passed"
    verdict = box.grade(bare, {"solution.py": ""})
    assert (verdict.outcome, verdict.total) == ("failed", 2)
    assert set(verdict.tests.values()) == {"missing"}


def test_every_style_of_test(box):
    tests = """
import unittest
import pytest
from pytest import approx
from solution import *

@pytest.mark.parametrize("a, b", [(1, 2), (3, 4)])
@pytest.mark.parametrize("sign", [1, -1], ids=["plus", "minus"])
def test_rows(a, b, sign):
    assert add(sign * a, sign * b) == sign * (a + b)

class TestMethods:
    def setup_method(self):
        self.values = [1]
    def test_method(self):
        assert add(self.values, [2]) == [1, 2]
    @pytest.mark.parametrize("x", [0.1])
    def test_close(self, x):
        assert add(x, 0.2) == approx(0.3)

class Case(unittest.TestCase):
    def setUp(self):
        self.one = 1
    def test_equal(self):
        self.assertEqual(add(self.one, 1), 2)
    def test_raises(self):
        with self.assertRaises(TypeError):
            add(1, "x")
    @unittest.skip("not today")
    def test_skipped(self):
        add()

def test_raises_with_text():
    with pytest.raises(TypeError, match="unsupported operand"):
        add(1, "x")
"""
    verdict = grade(box, ADD, tests)
    assert (verdict.outcome, verdict.passed, verdict.total) == ("passed", 9, 9)
    assert "tests/test_solution.py::test_rows[1-0]" in verdict.tests
    assert "tests/test_solution.py::TestMethods::test_close[0]" in verdict.tests
    assert "tests/test_solution.py::Case::test_skipped" not in verdict.tests
    assert grade(box, "def add(a, b):\n    return 2\n", tests).passed == 1


def test_fixtures_and_marks_run_under_pytest(box):
    tests = """
import pytest
from solution import add

@pytest.fixture
def three():
    return 3

def test_fixture(three, tmp_path):
    (tmp_path / "x").write_text("y")
    assert add(three, 1) == 4

@pytest.mark.xfail(strict=True)
def test_known_bug():
    assert add(1, 1) == 3

def test_interrupt(three):
    assert add(0, 0) == 0
"""
    verdict = grade(box, ADD, tests)
    assert (verdict.outcome, verdict.passed, verdict.total) == ("passed", 3, 3)
    verdict = grade(box, "def add(a, b):\n    if a == 3: raise KeyboardInterrupt\n    return 3\n", tests)
    assert verdict.tests == {"tests/test_solution.py::test_fixture": "failed",
                             "tests/test_solution.py::test_known_bug": "failed",
                             "tests/test_solution.py::test_interrupt": "failed"}


# ---- the wire ----

VALUES = [
    None, True, False, 0, -1, 10**18, 2**63, -2**63 - 1, 10**5000, 0.0, -0.0, 1e-320, 0.1, float("inf"),
    float("-inf"), float("nan"), 1j, complex(-0.0, float("inf")), "", "aé\0☃\U0001f600", "\ud800",
    "\ud83d\ude00", b"", b"\0\xff", [], [1, [2, []]], (), (1,), ((), ([],)), {}, {"a": 1},
    {(1, None): {2: [3]}, 1.5: "x", b"k": ()},
    set(), {1, "a", (2,)}, frozenset(), frozenset({frozenset({1})}), range(0), range(1, 10**20, 3), ...,
    [True, 1, 1.0], {True: "t"},
]


def wires() -> tuple[Wire, Wire]:
    one, other = socket.socketpair()
    return Wire(one, parity=0), Wire(other, parity=1)


def exact(value: object) -> str:
    return f"{type(value).__name__} {value!r}" if not isinstance(value, int) else f"{type(value)} {value:x}"


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_cross_exactly(value):
    judge, solution = wires()
    judge.send({"op": "call"}, value)
    message, there = solution.recv()
    assert message["op"] == "call"
    judge_side, solution_side = wires()
    solution_side.send({}, there)
    _, back = judge_side.recv()
    assert exact(there) == exact(value) == exact(back)


def test_values_cross_through_the_sandbox(box):
    tests = f"""
from math import inf, nan
from solution import same
VALUES = {[v for v in VALUES if type(v) not in (int, complex) or v in (-1, 2**63, 1j)]!r}
def test_same():
    for value in VALUES:
        assert repr(same(value)) == repr(value)
def test_keywords():
    assert same(value=(1, 2)) == (1, 2)
""".replace("Ellipsis", "...")
    same = "def same(value):\n    return value\n"
    assert grade(box, same, tests, same).outcome == "passed"


def test_changes_and_aliases_cross():
    judge, solution = wires()
    inner = [1]
    value = [inner, inner, {"k": inner}]
    judge.send({}, value)
    _, there = solution.recv()
    assert there[0] is there[1] is there[2]["k"]
    there[0].append(True)
    there[2]["new"] = {3}
    solution.send({}, there[1])
    _, answer = judge.recv()
    assert answer is inner and value == [[1, True], [1, True], {"k": [1, True], "new": {3}}]
    inner[0] = 1.0  # equal, and yet another value
    judge.send({})
    solution.recv()
    assert type(there[0][0]) is float


def test_unheld_objects_are_dropped():
    judge, solution = wires()
    held = [0]
    for number in range(10):
        judge.send({}, [held, [number]])
        solution.recv()
        solution.send({}, {number})
        judge.recv()
    judge.send({})
    solution.recv()
    assert len(judge.objects) <= 3 and len(solution.objects) <= 3
    assert any(obj is held for obj in judge.objects.values())


def test_a_cycle_crosses():
    judge, solution = wires()
    loop: list = []
    loop.append(loop)
    judge.send({}, loop)
    _, there = solution.recv()
    assert there[0] is there and len(there) == 1


def test_in_place_changes_and_shared_defaults_are_those_of_one_process(box):
    tests = """
from solution import sort, collect, log
def test_in_place():
    values = [3, 1, 2]
    assert sort(values) is None and values == [1, 2, 3]
def test_the_same_list():
    first = collect(1)
    assert collect(2) is first and first == [1, 2]
    assert log == ["sort", 1, 2]
"""
    reference = """
log = []
def sort(values):
    log.append("sort")
    values.sort()
def collect(x, seen=[]):
    log.append(x)
    seen.append(x)
    return seen
"""
    verdict = grade(box, reference, tests, reference)
    assert verdict.outcome == "passed", verdict.output
    assert grade(box, reference.replace("seen=[]", "seen=()").replace("seen.append", "seen = [*seen"
                 ).replace("[*seen(x)", "[*seen, x]"), tests, reference).passed == 1


@pytest.mark.parametrize("value", [object(), int, len, iter(()), type("Int", (int,), {})(3), memoryview(b"x"),
                                   [object()], {"k": [lambda: 0]}, ValueError()])
def test_what_cannot_cross_is_named_and_leaves_no_trace(value):
    judge, solution = wires()
    with pytest.raises(Unplain):
        judge.send({}, value)
    judge.send({}, [7])
    assert solution.recv()[1] == [7]


def test_a_failed_frame_loses_no_news():
    judge, solution = wires()
    judge.send({}, [1])
    _, kept = solution.recv()
    with pytest.raises(Unplain):  # meanwhile [1] is unheld here
        judge.send({}, object())
    judge.send({})
    solution.recv()
    solution.send({}, kept)
    assert judge.recv()[1] == [1]


def test_a_spoilt_argument_fails_its_own_test_only(box):
    tests = """
from solution import add_to
def test_spoilt():
    add_to([])
def test_other():
    assert add_to((1,)) == 1
"""
    reference = "def add_to(x):\n    return len(x)\n"
    code = "def add_to(x):\n    if type(x) is list: x.append('x' * (20 << 20))\n    return len(x)\n"
    verdict = grade(box, code, tests, reference)
    assert list(verdict.tests.values()) == ["failed", "passed"] and "bytes" in verdict.output


def test_depth_and_size_are_bounded():
    judge, _ = wires()
    deep: tuple = ()
    for _ in range(200):
        deep = (deep,)
    with pytest.raises(Unplain, match="deep"):
        judge.send({}, deep)
    with pytest.raises(Unplain, match="bytes"):
        judge.send({}, "x" * (17 << 20))
    flat: list = []
    for _ in range(5000):
        flat = [flat]
    one, other = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(Wire(one, parity=0).send, {}, flat)
        assert len(Wire(other, parity=1).recv()[1]) == 1


@pytest.mark.parametrize("frame", [
    b"", b"[]", b"{", b"null", b"\xff", b'{"value": 1}', b'{"value": {}, "heap": [], "drop": []}',
    b'{"value": ["ref", 5], "heap": [], "drop": []}', b'{"value": ["object"], "heap": [], "drop": []}',
    b'{"value": 1, "heap": [[2, "list", []]], "drop": []}',
    b'{"value": 1, "heap": [[1, "type", []]], "drop": []}',
    b'{"value": 1, "heap": [[1, "dict", [1]]], "drop": []}', b'{"value": ["range"], "heap": [], "drop": []}',
    b'{"value": 1, "heap": [[1, "set", [["ref", 1]]]], "drop": []}', b'{"value": 1, "heap": [], "drop": [0]}',
    b'{"value": ["int", "zz"], "heap": [], "drop": []}',
    b'{"value": ' + b"9" * 5000 + b', "heap": [], "drop": []}',
    b'{"value": ' + b'["tuple", ' * 200 + b"1" + b"]" * 200 + b', "heap": [], "drop": []}', b"[" * 100_000])
def test_nonsense_is_broken(frame):
    one, other = socket.socketpair()
    one.settimeout(5)
    with one, other:
        send_frame(one, frame)
        with pytest.raises(Broken):
            Wire(other, parity=0).recv()
        one.send(b"\xff\xff\xff\xff")
        with pytest.raises(Broken):
            Wire(other, parity=0).recv()


def test_exceptions_cross_by_their_built_in_class(box):
    tests = """
import pytest
from solution import fail
def check(kind, base, *args):
    with pytest.raises(base) as caught:
        fail(kind)
    assert type(caught.value).__mro__[-len(base.__mro__):] == base.__mro__ and caught.value.args == args
def test_value():
    check("value", ValueError, "bad", 3)
def test_key():
    check("key", KeyError, ("k", 1))
def test_own():
    check("own", LookupError, "mine")
def test_os():
    with pytest.raises(FileNotFoundError) as caught:
        fail("os")
    assert caught.value.errno == 2
def test_unicode():
    check("unicode", UnicodeDecodeError, "utf-8", b"x", 0, 1, "reason")
def test_exit():
    check("exit", SystemExit, 3)
"""
    reference = """
class Own(LookupError):
    def __init__(self):
        super().__init__("mine")
def fail(kind):
    raise {"value": ValueError("bad", 3), "key": KeyError(("k", 1)), "own": Own(), "os": OSError(2, "gone"),
           "unicode": UnicodeDecodeError("utf-8", b"x", 0, 1, "reason"), "exit": SystemExit(3)}[kind]
"""
    verdict = grade(box, reference, tests, reference)
    assert verdict.outcome == "passed", verdict.output
    assert type(rebuild(["Mine", "eval", "KeyError"], [1])) is KeyError
    assert type(rebuild(["UnicodeDecodeError", "ValueError"], ["x"])) is ValueError


# ---- cheats: none may pass ----

WRONG = "def add(a, b):\n    return None\n"
CHEATS = {
    "equal to everything": "class Y:\n    def __eq__(s, o): return True\ndef add(a, b): return Y()\n",
    "in a list": "class Y:\n    def __eq__(s, o): return True\ndef add(a, b): return [Y()]\n",
    "int subclass": "class Y(int):\n    def __eq__(s, o): return True\ndef add(a, b): return Y(1)\n",
    "spoofed class": "class Y:\n    __class__ = int\n    def __eq__(s, o): return True\n"
        "def add(a, b): return Y()\n",
    "exit in the call": "import os\ndef add(a, b): os._exit(0)\n",
    "sys.exit in the call": "import sys\ndef add(a, b): sys.exit(0)\n",
    "interrupt": "def add(a, b): raise KeyboardInterrupt\n",
    "generator exit": "def add(a, b): raise GeneratorExit\n",
    "unittest skip": "import unittest\ndef add(a, b): raise unittest.SkipTest('x')\n",
    "pytest skip": "import pytest\ndef add(a, b): pytest.skip('x')\n",
    "pytest exit": "import pytest\ndef add(a, b): pytest.exit('x', returncode=0)\n",
    "class named Skipped": "class Skipped(BaseException): pass\ndef add(a, b): raise Skipped\n",
    "printed summary": "print('2 passed in 0.01s', flush=True)\nimport os\nos._exit(0)\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
    "builtins": "import builtins\nbuiltins.all = builtins.isinstance = lambda *a: True\n"
                "builtins.AssertionError = OSError\n" + WRONG,
    "sys.modules": "import sys, types\nclass M(types.ModuleType):\n"
        "    def __getattr__(s, n): return lambda *a: s\n    def __eq__(s, o): return True\n"
        "sys.modules['solution'] = M('solution')\n",
    "pytest patched": "import _pytest.python as p\np.Function.runtest = lambda self: None\n" + WRONG,
    "test code found by gc": "import gc, types\ndef add(a, b):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, types.FunctionType) and o.__name__.startswith('test_'):\n"
        "            o.__code__ = (lambda: None).__code__\n",
    "expected value in the caller's frame": "import sys\ndef add(a, b):\n    f = sys._getframe(1)\n"
        "    while f:\n        for c in f.f_code.co_consts:\n            if c in (5, 'xy'): return c\n"
        "        f = f.f_back\n",
    "test text in memory": "import re\ndef add(a, b):\n    for line in open('/proc/self/maps'):\n"
        "        low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        if 'rw-p' in line and high - low < 1 << 26:\n"
        "            with open('/proc/self/mem', 'rb') as f:\n                f.seek(low)\n"
        "                if re.search(rb'test_[o]ne\\(\\)', f.read(high - low)):\n"
        "                    return 5 if a == 2 else 'xy'\n",
    "reads the tests": "import glob\ndef add(a, b):\n"
        "    if glob.glob('/tests/*') + glob.glob('/proc/*/root/tests/*'): return 5 if a == 2 else 'xy'\n",
    "frame in advance": "import json, os\nm = json.dumps({'value': 5, 'heap': [], 'drop': []}).encode()\n"
        "os.write(3, len(m).to_bytes(4, 'little') + m)\n" + WRONG,
    "reward file": "import os\nos.makedirs('/logs/verifier', exist_ok=True)\n"
        "open('/logs/verifier/reward.txt', 'w').write('1')\n" + WRONG,
    "conftest": "open('/app/conftest.py', 'w').write('collect_ignore_glob = [\"*\"]')\n" + WRONG,
    "too much": "def add(a, b): return 'x' * (20 << 20)\n",
    "too deep": "def add(a, b):\n    t = ()\n    for _ in range(500): t = (t,)\n    return t\n",
    "segfault": "import ctypes\ndef add(a, b): ctypes.string_at(0)\n",
    "kill the parent": "import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\n" + WRONG,
    "kill all": "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\n" + WRONG,
    "own tests by star import": "def test_one(): pass\ndef test_two(): pass\n" + WRONG,
    "recursion": "def add(a, b): return add(a, b)\n",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_score_nothing_and_are_the_solutions_fault(box, name):
    verdict = grade(box, CHEATS[name])
    assert verdict.reward == 0.0 and verdict.outcome in ("failed", "error"), verdict


def test_an_unfit_answer_satisfies_no_raises(box):
    tests = """
import pytest
from solution import check
def test_refuses():
    with pytest.raises((TypeError, Exception)):
        check("x")
def test_refuses_all():
    try:
        check("x")
    except BaseException:
        return
    assert False
"""
    reference = "def check(x):\n    raise TypeError\n"
    assert grade(box, reference, tests, reference).outcome == "passed"
    for code in ("def check(x):\n    return object()\n", "import os\ndef check(x):\n    os._exit(0)\n"):
        assert grade(box, code, tests, reference).passed == 0


def test_star_import_brings_the_names_of_the_reference_only(box):
    tests = "from solution import *\n\ndef test_all():\n    assert all([add(1, 1) == 2, add(1, 2) == 3])\n"
    assert grade(box, "def all(x): return True\ndef add(a, b): return 0\n", tests).outcome == "failed"
    assert grade(box, "from math import *\nhelper = object()\n" + ADD, tests).outcome == "passed"
    assert grade(box, ADD, tests, "import math\nhelper = object()\nfrom os import path\n" + ADD).passed == 1


def test_conditional_skip_by_the_solutions_word_is_no_pass(box):
    tests = "import pytest, solution\ndef test_a():\n    if solution.add(1, 1) is None: pytest.skip('x')\n"
    assert grade(box, WRONG, tests).outcome == "failed"


# ---- walls ----

def look(box, body: str) -> str:
    """What a solution prints that looks around."""
    verdict = grade(box, f"def add(a, b):\n{body}\n")
    return verdict.output.partition("\n")[0]


def test_it_sees_no_host(box):
    assert look(box, "    import os; print(sorted(os.listdir('/')))") == str(
        sorted({"app", "bin", "dev", "etc", "lib", "lib64", "proc", "sbin", "tmp", "usr"}
               | {p.split("/")[1] for p in box.settings["paths"]}))
    assert look(box, "    import os; print(os.path.exists('/etc/passwd'), os.getpid(), os.getuid())") == (
        "False 1 1000")
    below_tmp = sorted({p.split("/")[2] for p in box.settings["paths"] if p.startswith("/tmp/")})  # an interpreter
    assert look(box, "    import os; print([sorted(os.listdir(p)) for p in ('/app', '/tmp', '/dev/shm')])") == (
        f"[['solution.py'], {below_tmp}, []]")
    assert look(box, "    import os; print([p for p in os.listdir('/proc') if p.isdigit()])") == "['1']"
    os.environ["HF_TOKEN"] = "secret"
    text = look(box, "    import os; print(open('/proc/1/environ').read(), os.environ)")
    assert "secret" not in text and "PYTHONHASHSEED" in text
    del os.environ["HF_TOKEN"]


def test_it_has_no_network_and_no_way_out(box):
    assert look(box, """
    import ctypes, os, socket
    libc, found = ctypes.CDLL(None), []
    for host in ("127.0.0.1", "1.1.1.1", "::1"):
        try: socket.create_connection((host, 80), 0.2); found.append(host)
        except OSError: pass
    for flags in (0x10000000, 0x20000, 0x40000000):
        if libc.unshare(flags) == 0: found.append(hex(flags))
    if libc.mount(b"none", b"/usr", None, 32 | 4096, None) == 0: found.append("mount")
    if libc.umount2(b"/proc", 2) == 0: found.append("umount")
    if libc.chroot(b"/tmp") == 0: found.append("chroot")
    for path in ("/x", "/usr/x", "/dev/x", "/proc/sys/user/max_user_namespaces"):
        try: open(path, "w"); found.append(path)
        except OSError: pass
    print(found)""") == "[]"


def test_resources_are_bounded(box):
    assert look(box, """
    import os, threading, time
    files, threads, written = 0, 0, 0
    try:
        while files < 5000: os.dup(1); files += 1
    except OSError: os.closerange(10, 5000)
    try:
        while threads < 500: threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); threads += 1
    except (RuntimeError, MemoryError): pass
    for path in ("/app/f", "/tmp/f", "/dev/shm/f"):
        try:
            with open(path, "wb") as file:
                while written < 1 << 30: written += file.write(bytes(1 << 20))
        except OSError: pass
    print(files < 300, threads < 64, written <= 3 * 65 << 20)""") == "True True True"


def test_fork_bomb_ends_with_the_run(box):
    code = "import os, time\ntry:\n    while True: os.fork()\nexcept OSError: pass\ntime.sleep(60)\n"
    verdict = grade(box, code)
    assert verdict.outcome == "timeout" and verdict.seconds < 3
    assert grade(box, ADD).outcome == "passed"


def test_nothing_passes_from_run_to_run(box):
    write = "for p in ('/app/x', '/tmp/x', '/dev/shm/x'): open(p, 'w')\n"
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n"
    for _ in range(4):
        assert grade(box, write + daemon + ADD).outcome == "passed"
    seen = "    import os; print([p for p in ('/app/x', '/tmp/x', '/dev/shm/x') if os.path.exists(p)])"
    assert [look(box, seen) for _ in range(4)] == ["[]"] * 4
    assert len(descendants()) == len([line for line in descendants() if "sandbox_inside" in line]) <= 4


CORRECT = {
    "noise": "import os\nos.write(1, b'\\xff\\x00' * 200000)\n",
    "subprocess": "import subprocess\nassert subprocess.check_output(['echo', 'hi']) == b'hi\\n'\n",
    "interpreter": "import subprocess, sys\nsubprocess.check_call([sys.executable, '-c', 'import json'])\n",
    "null device": "open('/dev/null', 'w').write('x')\n",
    "thread left": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n",
    "main guard": "if __name__ == '__main__':\n    raise SystemExit(3)\n",
    "atexit": "import atexit\natexit.register(lambda: 1 / 0)\n",
    "stdout closed": "import sys\nsys.stdout.close()\n",
    "temporary file": "import tempfile\ntempfile.NamedTemporaryFile('w').write('x')\n",
    "forked child that returns": "import os\nif os.fork() == 0:\n    pass\n",
    "own types": "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int = 0\np = P()\n",
}


@pytest.mark.parametrize("name", CORRECT)
def test_right_solutions_pass(box, name):
    verdict = grade(box, CORRECT[name] + ADD)
    assert verdict.outcome == "passed", verdict


def test_output_is_cut_and_the_same_every_time(box):
    code = "import os\ndef add(a, b):\n    print('é' * 9999)\n    print(object(), os.getpid(), {'a', 'b'})\n"
    outputs = {grade(box, code).output for _ in range(4)}
    assert len(outputs) == 1 and 3900 < len(outputs.pop().encode()) <= 4096


def test_flood_of_output_is_bounded(box):
    code = "import os\nfor _ in range(100): os.write(1, bytes(1 << 20))\n" + ADD
    verdict = grade(box, code)
    assert verdict.outcome == "passed" and len(verdict.output) <= 4096


def test_many_threads_share_the_workers(box):
    def one(number: int) -> str:
        return grade(box, f"print({number})\n" + (ADD if number % 2 else WRONG)).outcome
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(one, range(60)))
    assert outcomes == ["failed", "passed"] * 30


# ---- life ----

def test_close_leaves_nothing():
    before = set(os.listdir("/proc/self/fd")), descendants()
    with sandbox.Sandbox(2) as box:
        assert grade(box, ADD).outcome == "passed"
        assert len(descendants()) > len(before[1])
    assert (set(os.listdir("/proc/self/fd")), descendants()) == before


def test_the_end_of_the_trainer_ends_everything(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(
        "import sandbox, types, threading, time\n"
        "box = sandbox.Sandbox(1, timeout_s=60)\n"
        "code = 'import os\\nos.fork()\\nos.fork()\\nimport time\\ntime.sleep(60)\\n'\n"
        "files = {'tests/test_a.py': b'import solution\\ndef test_a(): pass\\n'}\n"
        "task = types.SimpleNamespace(id='t', files=files)\n"
        "threading.Thread(target=box.grade, args=(task, {'solution.py': code})).start()\n"
        "time.sleep(1.5)\nprint('running', flush=True)\ntime.sleep(60)\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    trainer = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    assert trainer.stdout.readline() == "running\n"
    tree = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(tuple(map(int, line.split())) for line in tree.splitlines())
    ours = {trainer.pid}
    for _ in range(6):
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    assert len(ours) >= 7  # trainer, two zygotes, judge, solution and its forks
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 10
    while left := [pid for pid in ours if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_without_walls(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = descendants()
    with sandbox.Sandbox(1, timeout_s=2, isolation="none") as box:
        assert grade(box, ADD).outcome == "passed"
        assert grade(box, WRONG).outcome == "failed"
        assert grade(box, "def add(a, b):\n    while True: pass\n").outcome == "timeout"
        daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n"
        assert grade(box, daemon + ADD).outcome == "passed"
        assert len(descendants()) == len(before) + 2
        text = look(box, "    print(__file__)")
        assert text == "/app/solution.py"
    assert not os.listdir(tmp_path)
    assert descendants() == before


def test_a_closed_sandbox_says_so():
    box = sandbox.Sandbox(1)
    box.close()
    box.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            grade(box, ADD)


def test_bad_settings():
    for wrong in ({"isolation": "docker"}, {"reward": "shaped"}, {"workers": 0}, {"timeout_s": 0}):
        with pytest.raises(ValueError):
            sandbox.Sandbox(**wrong)


# ---- command line ----

def command(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, sandbox.__file__, *map(str, arguments)], capture_output=True,
                          text=True, check=False)


def test_command_line(tmp_path):
    solution, tests = tmp_path / "mine.py", tmp_path / "check.py"
    solution.write_text(ADD)
    tests.write_text(ADD_TESTS)
    done = command("--solution", solution, "--tests", tests, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
    assert list(result) == ["outcome", "reward", "passed", "total", "seconds", "output"]
    assert (result["outcome"], result["reward"], result["passed"], result["total"]) == ("passed", 1.0, 2, 2)
    solution.write_text(WRONG)
    assert command("--solution", solution, "--tests", tests).stdout.startswith("failed: 0 of 2 tests")


def test_command_line_mistakes(tmp_path):
    missing = ("--solution", tmp_path / "no.py", "--tests", tmp_path)
    for arguments in ((), missing, ("--check", "--isolation", "x")):
        done = command(*arguments)
        assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no.py" in command(*missing).stderr


def test_check():
    level, *tried = command("--check").stdout.splitlines()
    assert level.partition(":")[0] in sandbox.LEVELS and len(tried) == 7
    assert all(line.startswith("cannot ") for line in tried)
    tried = command("--check", "--isolation", "none").stdout.splitlines()[1:]
    assert len(tried) == 7 and all(line.startswith("CAN ") for line in tried)  # the canaries can tell
