"""Handles: what solutions define and tests hand over, and attacks on the way in which both cross."""
import json

import pytest
from test_sandbox import task

import sandbox

REFERENCE = """
import contextlib, dataclasses, enum, functools
class Err(ValueError):
    def __init__(self, code):
        super().__init__(f"code {code}"); self.code = code
class Stack:
    'A stack.'
    size = 7
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x)
    def pop(self):
        if not self.items: raise Err(3)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __eq__(self, o): return isinstance(o, Stack) and o.items == self.items or o == self.items
    def __hash__(self): return hash(tuple(self.items))
    def __repr__(self): return f"Stack({self.items})"
    def __contains__(self, x): return x in self.items
    def __getitem__(self, i): return self.items[i]
    def __add__(self, o): return Stack(self.items + list(o))
    @property
    def top(self): return self.items[-1]
    @classmethod
    def of(cls, *a): return cls(a)
    @staticmethod
    def two(): return 2
@dataclasses.dataclass(order=True)
class P:
    x: int
    y: int = 0
class Color(enum.Enum):
    RED = 1
    BLUE = 2
def gen(n):
    for i in range(n):
        yield i
def apply(f, xs): return [f(x) for x in xs]
def adder(n):
    def add(x): return x + n
    return add
@contextlib.contextmanager
def ctx(log):
    log.append("in")
    try: yield 5
    finally: log.append("out")
@functools.lru_cache
def fib(n): return n if n < 2 else fib(n-1) + fib(n-2)
def memo(f):
    cache = {}
    @functools.wraps(f)
    def w(*a):
        if a not in cache: cache[a] = f(*a)
        return cache[a]
    w.cache = cache
    return w
def names(people): return sorted(p.name for p in people)
def sort_by(xs, key): xs.sort(key=key)
def helper(): return 1
def uses_helper(): return helper() + 1
"""
TESTS = """
import copy, types, collections.abc, inspect
import pytest
import solution
from solution import *
def test_stack():
    s = Stack()
    s.push(1); s.push(2)
    assert len(s) == 2 and list(s) == [1, 2] and s == Stack([1, 2]) and s != Stack()
    assert s == [1, 2]
    assert isinstance(s, Stack) and type(s) is Stack and not isinstance(s, list)
    assert repr(s) == "Stack([1, 2])" and str(s) == "Stack([1, 2])"
    assert {s: 1}[Stack([1, 2])] == 1 and 2 in s and s[0] == 1 and s.top == 2
    assert Stack.of(1, 2) == s and Stack.two() == 2 and Stack.size == 7 and Stack.__name__ == "Stack"
    assert list(s + [3]) == [1, 2, 3] and s.items == [1, 2] and hasattr(s, "push") and not hasattr(s, "x")
    s.items.append(9)
    assert s.pop() == 9
    s.name = "n"; assert s.name == "n"
    assert copy.copy(s) == s and Stack.__doc__ == "A stack."
def test_err():
    with pytest.raises(Err, match="code 3") as e:
        Stack().pop()
    assert e.value.code == 3 and isinstance(e.value, ValueError) and str(e.value) == "code 3"
    with pytest.raises(ValueError): Stack().pop()
    assert issubclass(Err, ValueError)
    try: raise Err(4)
    except Err as exc: assert exc.code == 4
def test_data():
    assert P(1, 2) == P(1, 2) and P(1) < P(2) and sorted([P(3), P(1)])[0].x == 1
    assert repr(P(1)) == "P(x=1, y=0)" and P(1).x == 1 and P(x=1).y == 0
    with pytest.raises(TypeError): hash(P(1))
def test_enum():
    assert Color.RED is Color.RED and Color.RED != Color.BLUE and Color.RED.value == 1 and Color(2) is Color.BLUE
    assert [c.name for c in Color] == ["RED", "BLUE"] and Color["RED"] is Color.RED and len(Color) == 2
    assert isinstance(Color.RED, Color)
def test_gen():
    g = gen(3)
    assert next(g) == 0 and list(g) == [1, 2] and isinstance(gen(1), types.GeneratorType)
    assert isinstance(gen(1), collections.abc.Iterator)
    with pytest.raises(StopIteration): next(g)
def test_call():
    assert apply(lambda x: x * 2, [1, 2]) == [2, 4] and adder(2)(3) == 5 and callable(adder(1))
    assert apply(str, [1]) == ["1"] and apply(len, ["ab"]) == [2]
    def bad(x): raise KeyError(x)
    with pytest.raises(KeyError): apply(bad, [1])
    class Own(Exception): pass
    def own(x): raise Own(x)
    with pytest.raises(Own) as e: apply(own, [1])
    assert type(e.value) is Own
    seen = []
    apply(seen.append, [1, 2]); assert seen == [1, 2]
def test_ctx():
    log = []
    with ctx(log) as x: assert x == 5 and log == ["in"]
    assert log == ["in", "out"]
    with pytest.raises(KeyError):
        with ctx(log): raise KeyError("k")
    assert log == ["in", "out"] * 2
def test_fib():
    assert fib(20) == 6765 and fib.cache_info().hits > 0
    fib.cache_clear()
    assert fib.__name__ == "fib"
def test_memo():
    calls = []
    @memo
    def sq(x):
        "doc"
        calls.append(x); return x * x
    assert sq(2) == 4 and sq(2) == 4 and calls == [2] and sq.__name__ == "sq" and sq.__doc__ == "doc"
    assert sq.cache == {(2,): 4}
class Person:
    def __init__(self, name): self.name = name; self._secret = 1
    def __lt__(self, o): return self.name < o.name
    def hello(self): return "hi"
def test_people():
    assert names([Person("b"), Person("a")]) == ["a", "b"]
    ps = [Person("b"), Person("a")]
    sort_by(ps, key=lambda p: p.name)
    assert [p.name for p in ps] == ["a", "b"]
    xs = [3, 1]; sort_by(xs, None); assert xs == [1, 3]
    ps.reverse(); sort_by(ps, None); assert [p.name for p in ps] == ["a", "b"]
"""


@pytest.fixture(scope="module")
def box():
    with sandbox.Sandbox(workers=1, timeout_s=4.0, memory_mb=256) as made:
        yield made


def test_objects_of_both_sides(box):
    verdict = box.grade(task("objects", TESTS, REFERENCE), {"solution.py": REFERENCE})
    assert verdict.outcome == "passed", verdict.output


POP = "from solution import S\ndef test_pop():\n    s = S()\n    s.push(3)\n    assert s.pop() == 3\n"
CLOSE = POP.replace("s.pop() == 3", "abs(s.pop() - 3) < 1e-6")
TEXT = POP.replace("push(3)", "push('ab')").replace("s.pop() == 3", "s.pop().startswith('a')")
RIGHT = """
class S:
    def push(self, x): self.x = x
    def pop(self): return self.x
    def run(self, f): return f()
"""
LIAR = """
class S:
    def push(self, x): pass
    def pop(self): return %s
    run = lambda self, f: %s
    def __eq__(self, o): return True
    def __sub__(self, o): return 0
    __rsub__ = __sub__
    def startswith(self, p): return True
class T(S, float): pass
"""


@pytest.mark.parametrize("answer", ["S()", "self", "T()", "[S()][0]", "type('X', (S, int), {})()", "S"])
@pytest.mark.parametrize("tests", [POP, CLOSE, TEXT])
def test_an_object_is_no_plain_value(box, tests, answer):
    assert box.grade(task(tests, tests, RIGHT), {"solution.py": RIGHT}).outcome == "passed"
    verdict = box.grade(task(tests, tests, RIGHT), {"solution.py": LIAR % (answer, "0")})
    assert (verdict.outcome, verdict.reward) == ("failed", 0.0), verdict


@pytest.mark.parametrize("tests", [POP, CLOSE])
def test_an_object_is_no_plain_value_without_a_reference_either(box, tests):
    verdict = box.grade(task("bare" + tests, tests), {"solution.py": LIAR % ("S()", "0")})
    assert (verdict.outcome, verdict.reward) == ("failed", 0.0), verdict



# Each test passes only if the solution returns the names that it got an answer for.
LEAK = """
from solution import look
class Person:
    def __init__(self):
        self.name, self._secret = "a", "s"
    def hello(self):
        return "hi"
def generate():
    yield 1
class Own(Exception):
    pass
def fail():
    raise Own(1)
def test_leak():
    try:
        fail()
    except Own as exc:
        error = exc
    assert look({}) != []
"""
LOOK = """
import gc
def look(thing):
    peer = next(found for found in gc.get_objects() if type(found).__name__ == "SolutionPeer")
    seen = []
    for name in NAMES:
        for op, arguments in OPS:
            if op == "set" and name[0] != "_":  # public data of an object may be set
                continue
            try:
                peer.operate(op, name, thing, arguments)
            except (AttributeError, TypeError) as exc:
                if "of the tests" not in str(exc):
                    seen.append((op, name, str(exc)))
            else:
                seen.append((op, name))
    return seen
"""
INSIDES = ["__globals__", "__code__", "__self__", "__closure__", "__class__", "__dict__", "__defaults__", "__wrapped__",
           "__builtins__", "__traceback__", "__context__", "__reduce_ex__", "__getattribute__", "__subclasses__",
           "__init__", "__func__", "__module__", "_secret", "gi_frame", "gi_code", "cr_frame", "f_back", "tb_frame",
           "mro", "with_traceback"]
HANDED = ["test_leak", "generate()", "Person()", "Person", "Person().hello", "error", "[].append"]
OPS = "OPS = [('get', ()), ('set', (1,)), ('del', ()), ('special', ()), ('copy', ())]\n"


@pytest.mark.parametrize("thing", HANDED)
def test_what_tests_hand_over_shows_no_insides(box, thing):
    tests = LEAK.replace("{}", thing)
    verdict = box.grade(task(tests, tests), {"solution.py": f"NAMES = {INSIDES}\n{OPS}{LOOK}"})
    assert verdict.outcome == "failed" and "AssertionError" in verdict.output, verdict


@pytest.mark.parametrize("thing, name", [("Person()", "name"), ("Person()", "hello"), ("generate()", "__next__")])
def test_the_look_at_insides_sees_what_is_shown(box, thing, name):
    tests = LEAK.replace("{}", thing)
    verdict = box.grade(task(tests, tests), {"solution.py": f"NAMES = [{name!r}]\n{OPS}{LOOK}"})
    assert verdict.outcome == "passed", verdict


RUN = "from solution import run\ndef test_run():\n    assert run(lambda *a: run(*a) if a else 1, 2) == 7\n"
A = "class A:\n    def __repr__(self): return %s\ndef run(f, x): return A()\n"
SHOW = "from solution import run\ndef test_run():\n    assert repr(run(None, 2)) == str(run(None, 2)) == '7'\n"
SEVEN = "def run(f, x=0):\n    return 7\n"
BOUNDS = {
    "giant repr": (SHOW, A % "'x' * (15 << 20)"),
    "too giant repr": (SHOW, A % "'x' * (40 << 20)"),
    "repr beyond memory": (SHOW, A % "'x' * (1 << 40)"),
    "endless repr": (SHOW, "class A:\n    def __repr__(self):\n        while True: pass\ndef run(f, x): return A()\n"),
    "repr of an own repr": (SHOW, A % "A()"),
    "callback flood": (RUN, "def run(f, x):\n    while True: f()\n"),
    "endless recursion": (RUN, "def run(f, *a):\n    return f(f, 2)\n"),
    "caught recursion": (RUN,
                         "def run(f, *a):\n    try: return f(f, 2)\n    except RecursionError: return run(f, 2)\n"),
    "a million objects": (RUN, "class A: pass\ndef run(f, x): return [A() for _ in range(10 ** 6)]\n"),
    "a million objects, one a call": (
        RUN, "class A: pass\nkept = []\ndef run(f, *a):\n    if not a: return 1\n    while True: f(A())\n"),
    "a flood of classes": (RUN, "def run(f, x): return [type('A', (), {})() for _ in range(10 ** 5)]\n"),
    "an endless generator": (SHOW.replace("assert", "assert run(None, 2) == 7 or list(run(None, 2)) or"),
                             "def run(f, x):\n    while True: yield 'x' * 1000\n"),
    "an object in itself": (RUN, "def run(f, x):\n    a = ()\n    for _ in range(10 ** 5): a = (a,)\n    return a\n"),
    "a hash that exits": (RUN, "import os\nclass A:\n    def __hash__(self): return 1 if os.getpid() == 0 or not out "
                               "else os._exit(0)\nout = []\ndef run(f, x):\n    s = {A()}; out.append(1); return s\n"),
    "an endless hash": (RUN, "class A:\n    def __hash__(self):\n        while out: pass\n        return 1\nout = []\n"
                             "def run(f, x):\n    s = {A()}; out.append(1); return s\n"),
    "a hash that calls the tests": (
        RUN, "class A:\n    def __hash__(self):\n        if out: out[0](out[0], 3)\n        return 1\nout = []\n"
             "def run(f, x):\n    s = {A()}; out.append(f); return s\n"),
    "always equal after a hash": (RUN,
                                  "class A:\n    def __eq__(self, o): return True\n    def __hash__(self): return 7\n"
                                  "def run(f, x): return A()\n"),
}
TEXTS = {"int": "return 5", "error": "raise ValueError(1)", "exit": "import os; os._exit(0)",
         "end": "raise SystemExit(0)", "interrupt": "raise KeyboardInterrupt", "object": "return object()",
         "self": "return str(self)",
         "giant": "return 'x' * (40 << 20)", "memory": "return 'x' * (1 << 40)", "endless": "while True: pass"}
BOUNDS |= {f"text of an exception: {name}": (
    RUN, f"class E(Exception):\n    def __str__(self):\n        {body}\n    __repr__ = __str__\n"
         "def run(f, x): raise E(5)\n") for name, body in TEXTS.items()}
BOUNDS |= {f"text of an exception at import: {name}": (RUN, BOUNDS[f"text of an exception: {name}"][1] + "raise E(5)\n")
           for name in TEXTS}
BOUNDS["rows that raise"] = (
    "import pytest\nfrom solution import *\n@pytest.mark.parametrize('x', ROWS)\ndef test_run(x):\n    "
    "assert run(0) == x\n", f"{SEVEN}class R:\n    def __iter__(self): raise OSError(5)\nROWS = R()\n")


@pytest.fixture(scope="module")
def short():
    with sandbox.Sandbox(workers=1, timeout_s=2.0, memory_mb=256) as made:
        yield made


@pytest.mark.parametrize("name", BOUNDS)
def test_excess_costs_the_solution_the_test_alone(short, name):
    tests, code = BOUNDS[name]
    reference = f"{SEVEN}ROWS = [7]\n"
    assert short.grade(task(tests, tests, reference), {"solution.py": reference}).outcome == "passed"
    for case in (task(tests, tests, reference), task(f"{tests}# bare", tests)):
        if "ROWS" in tests and "solution/solution.py" not in case.files:  # the rows are the solution's to give
            continue
        verdict = short.grade(case, {"solution.py": code})
        assert verdict.outcome in ("failed", "error", "timeout", "oom") and verdict.reward == 0.0, verdict
        assert verdict.seconds < 4


def kind(number=0, name="A", module="solution", bases=(), methods=("__eq__", "__hash__", "__sub__"), blocked=()):
    return [number, name, name, module, None, list(bases), list(methods), list(blocked)]


OBJECT = ["obj", 1, 0]
SKIP = ["builtin", "unittest.case", "SkipTest"]
FRAMES = [  # what a message may hold besides its heap
    *[{"value": value} for value in (
        ["own", 0], ["own", 10 ** 9], ["own", [1]], ["own"], OBJECT, ["obj", 1, 10 ** 6], ["fun", 1],
        ["fun", {}, {}, {}],
        ["fun", 1, "f", None], ["gen", 5], ["gen", []], ["class", 3], ["class", []], ["builtin", "eval"],
        ["builtin", "os", "system"], SKIP, ["exc", "SystemExit", 0], ["exc", "Skipped"], ["exc"],
        ["name", "os", "system"], ["name", "solution", "run"], ["tuple", ["own", 0], OBJECT],
        ["ref", 0], ["ZoneInfo", "Africa"],
        ["slice"],
        [], [[]], ["Pattern", "(" * 500, 0], ["scalar", "O", ["bytes", "00" * 8]], {}, True)],
    *[{"value": OBJECT, "classes": classes} for classes in (
        [kind()], [kind(name="int", module="builtins")], [kind(bases=[["class", 0]])], [kind(bases=[SKIP])],
        [kind(bases=[["builtin", "builtins", "int"]])], [kind(methods=["__init__"])], [kind(methods=[[]])],
        [kind(blocked=["__class__"])], [kind(blocked=["__getattribute__", "__eq__"])], [kind(blocked=["__slots__"])],
        [kind(name=5)], [kind(name="\0")], [kind(), kind()], [kind(n) for n in range(3000)], [[]], 5, [kind(-1)],
        [kind(bases=[["builtin", "builtins", "SystemExit"], ["builtin", "builtins", "OSError"]])])],
    {"value": ["tuple", *[["obj", n, 0] for n in range(300_000)]], "classes": [kind()]},
    *[{"raise": "", "value": value, "classes": [kind(bases=[["builtin", "builtins", base]], name="Skipped",
                                                     module="_pytest.outcomes")]}
      for base in ("KeyboardInterrupt", "SystemExit", "GeneratorExit", "StopIteration", "UnicodeDecodeError",
                   "ExceptionGroup") for value in (OBJECT, [*OBJECT, "a", 5])],
    {"raise": "", "value": 5}, {"raise": {}, "value": ["exc", "SystemExit", 0]}, {"raise": "", "value": SKIP},
    {"callable": True, "value": 7}, {"missing": True, "value": 7}, {"unplain": ["x"] * 1000, "value": 7},
    {"memory": 1, "value": 7}, {"value": 0, "free": [0, 0, 1]}, {"value": 7, "free": [[]]}, {"value": 7, "free": 5},
    *[{"op": op, "name": name, "value": value} for op in ("get", "call", "invoke", "special", "set", [], None)
      for name in ("__globals__", "__class__", 5, None) for value in (["tuple", ["own", 0], ["tuple"], ["tuple"]], 7)],
    {"op": "invoke", "value": ["tuple", ["own", 0], ["tuple"], ["tuple"]]},
]
RAW = """
import os, struct
def run(f, x):
    data = struct.pack("<I", len(FRAME)) + FRAME
    while data:
        data = data[os.write(3, data):]
    return 0
"""
ONCE = "from solution import run\ndef test_run():\n    assert run(len, 2) == 7\n"


def test_a_frame_by_hand_arrives(short):
    frame = json.dumps({"drop": [], "heap": [], "value": 7}).encode()
    assert short.grade(task("raw", ONCE, SEVEN), {"solution.py": f"FRAME = {frame!r}\n{RAW}"}).outcome == "passed"


def test_frames_by_hand_gain_nothing(short):
    frames = [json.dumps({"drop": [], "heap": []} | frame).encode() for frame in FRAMES]
    frames += [b"", b"{}", b"[]", b"7", b"[" * 100_000, b"\xff", b'{"drop": [0]}',
               b'{"drop": [], "heap": [[1, "list"]]}']
    for frame in frames:
        code = f"FRAME = {frame!r}\n{RAW}"
        for case in (task("raw", ONCE, SEVEN), task("bare raw", ONCE)):
            verdict = short.grade(case, {"solution.py": code})
            assert verdict.outcome in ("failed", "error", "timeout", "oom"), (frame[:300], verdict)


def test_patches_hold_during_the_call_and_are_undone(box):
    code = "def helper():\n    return 1\ndef run(x):\n    return helper() + x\n" \
           "class C:\n    def f(self):\n        return 3\n"
    tests = """
from unittest import mock
import solution
def test_patches(monkeypatch):
    for _ in range(2):
        monkeypatch.setattr(solution, "helper", lambda: 5)
        monkeypatch.setattr(solution.C, "f", lambda self: 7)
        assert solution.run(1) == 6 and solution.C().f() == 7
        monkeypatch.undo()
        assert solution.run(1) == 2 and solution.helper() == 1 and solution.C().f() == 3
        with mock.patch("solution.helper", return_value=8), mock.patch.object(solution.C, "f", lambda self: 9):
            assert solution.run(1) == 9 and solution.C().f() == 9
        assert solution.run(1) == 2 and solution.helper() == 1 and solution.C().f() == 3
"""
    verdict = box.grade(task("patches", tests, code), {"solution.py": code})
    assert verdict.outcome == "passed", verdict


def test_own_keys_in_sets_and_dicts(box):
    code = "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass P:\n    x: int\n" \
           "def made():\n    return {P(1), P(2)}, {P(1): [2]}\n"
    tests = "from solution import P, made\ndef test_made():\n    found, table = made()\n" \
            "    assert found == {P(2), P(1)} and P(1) in found and P(3) not in found and table == {P(1): [2]}\n"
    verdict = box.grade(task("keys", tests, code), {"solution.py": code})
    assert verdict.outcome == "passed", verdict
    assert box.grade(task("keys", tests, code), {"solution.py": code.replace("P(2)}", "P(3)}")}).outcome == "failed"


SQUARES = """
from solution import square
def test_squares():
    for got, want in zip(map(square, [1, 2, 3]), [1, 4, 9]):
        assert got == want
"""
FIRST = """
import pytest
from solution import first
def test_first():
    assert first([7]) == 7
    with pytest.raises(StopIteration): first([])
"""
HONEST = {SQUARES: "def square(x): return x * x", FIRST: "def first(items): return next(iter(items))"}


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("end", ["StopIteration", "type('End', (StopIteration,), {})"])
def test_a_solution_ends_no_loop_of_the_tests(box, end, reference):
    tests = task(f"loop {reference}", SQUARES, HONEST[SQUARES] if reference else None)
    verdict = box.grade(tests, {"solution.py": f"def square(x): raise {end}"})
    assert (verdict.outcome, verdict.reward) == ("failed", 0.0) and "StopIteration" in verdict.output, verdict
    assert box.grade(tests, {"solution.py": HONEST[SQUARES]}).outcome == "passed"


def test_stop_iteration_is_an_answer_where_the_reference_gave_it(box):
    first = task("first", FIRST, HONEST[FIRST])
    assert box.grade(first, {"solution.py": HONEST[FIRST]}).outcome == "passed"
    assert box.grade(first, {"solution.py": "def first(items): raise StopIteration"}).outcome == "failed"


def test_numpy_arrays_cross_with_their_exact_content(box):
    reference = ("import numpy as np\ndef double(x): return x * 2\ndef same(x): return x\n"
                 "def fill(x):\n    x[0] = 5\ndef strange(): return np.array([{}])\n")
    tests = """
import numpy as np, pytest
from solution import double, fill, same
def test_content():
    for dtype in ("float32", "int8", ">i4", "complex128", "bool", "<U3", "datetime64[s]"):
        given = np.array([[1, 0], [2, 3]]).astype(dtype)
        got = same(given)
        assert type(got) is np.ndarray and got.dtype == given.dtype and got.tobytes() == given.tobytes()
        assert got.shape == given.shape
    got = double(np.float32(1.5))
    assert type(got) is np.float32 and got == 3
    assert double(np.zeros((0, 3))).shape == (0, 3)
def test_in_place():
    x = np.arange(3)
    fill(x)
    assert x.tolist() == [5, 1, 2]
"""
    arrays = task("arrays", tests, reference)
    verdict = box.grade(arrays, {"solution.py": reference})
    assert verdict.outcome == "passed", verdict
    verdict = box.grade(arrays, {"solution.py": reference.replace("return x\n", "return x.astype('float64')\n")})
    assert verdict.outcome == "failed", verdict
    objects = task("objects", "from solution import strange\ndef test_it():\n    assert strange().shape == (1,)\n")
    verdict = box.grade(objects, {"solution.py": reference})
    assert verdict.outcome == "failed" and "object" in verdict.output, verdict
