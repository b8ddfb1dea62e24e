"""Tasks whose test is a script, tests/test.sh: what it sees of the solution, its reward, and who cannot touch it."""

import subprocess
import sys
from pathlib import Path

import pytest

import quarantine
from archives import Task
from sandbox import Sandbox
from sandbox_verifier import read_reward

ADD = "def add(a, b):\n    return a + b\n"
CHECK = "from solution import add\nassert add(2, 3) == 5 and add('x', 'y') == 'xy'\n"
SCRIPT = """\
set -e
trap 'if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt' EXIT
export PYTHONPATH=/app
python /tests/check.py
"""
FRACTION = """\
export PYTHONPATH=/app
good=0
for n in 1 2 3 4; do
  if python -c "from solution import square; assert square($n) == $n * $n" 2> /dev/null; then good=$((good + 1)); fi
done
echo "{\\"reward\\": $(python -c "print($good / 4)"), \\"of\\": 4}" > /logs/verifier/reward.json
"""
SQUARE = "def square(n):\n    return n * n\n"
ECHO = """\
if [ "$(printf '1 2\\n3 4\\n' | python /app/solution.py --sum)" = "$(printf '3\\n7')" ]; then echo 1; else echo 0; fi \
> /logs/verifier/reward.txt
"""
SUMS = "import sys\nassert sys.argv[1:] == ['--sum']\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))\n"


def task(script, reference=None, **tests):
    files = {"tests/test.sh": script.encode()} | {f"tests/{name}.py": text.encode() for name, text in tests.items()}
    reference = {"solution/solution.py": reference.encode()} if reference else {}
    return Task(f"{hash((script, *reference.values(), *tests.values()))}", "Add.", files | reference)


@pytest.fixture(scope="module")
def box():
    with Sandbox(workers=2, timeout_s=10.0, memory_mb=512) as made:
        yield made


def grade(box, script, code, reference=None, **tests):
    verdict = box.grade(task(script, reference, **tests), {"solution.py": code})
    assert (verdict.passed, verdict.total) == (int(verdict.outcome == "passed"), int(verdict.outcome != "infra"))
    return verdict


@pytest.mark.parametrize("files, score, ending, error", [
    (("1\n", None), 1.0, "", ""),
    ((" 0.25 ", '{"reward": 1}'), 0.25, "", ""),  # reward.txt goes first
    ((None, '{"reward": 0.5, "tests": 2}'), 0.5, "", ""),
    ((None, "0"), 0.0, "", ""),
    ((None, None), None, "RewardFileNotFoundError", "wrote neither reward.txt nor reward.json"),
    (("\n", '{"reward": 1}'), None, "RewardFileEmptyError", "reward.txt is empty"),
    ((None, ""), None, "RewardFileEmptyError", "reward.json is empty"),
    (("passed", None), None, "VerifierOutputParseError", "reward.txt holds no reward: 'passed'"),
    ((None, '{"score": 1}'), None, "VerifierOutputParseError", "reward.json holds no reward"),
    ((None, '{"reward": true}'), None, "VerifierOutputParseError", "reward.json holds no reward"),
    ((None, '{"reward": '), None, "VerifierOutputParseError", "reward.json holds no reward"),
    (("1.5", None), None, "VerifierOutputParseError", "reward.txt holds 1.5, which is out of range 0 to 1"),
    (("-0.1", None), None, "VerifierOutputParseError", "out of range"),
    (("nan", None), None, "VerifierOutputParseError", "out of range"),
    ((None, "Infinity"), None, "VerifierOutputParseError", "out of range"),
])
def test_read_reward(files, score, ending, error):
    found = read_reward(dict(zip(("reward.txt", "reward.json"), files, strict=True)))
    assert found[:2] == (score, ending) and error in found[2] and bool(error) == bool(found[2])


def test_a_script_imports_the_solution(box):
    verdict = grade(box, SCRIPT, ADD, ADD, check=CHECK)
    assert (verdict.outcome, verdict.reward, verdict.tests) == ("passed", 1.0, {"tests/test.sh": "passed"}), verdict
    for code in ("add = max\n", "", "def add(:\n", "import os\nos._exit(0)\n", "raise SystemExit(0)\n"):
        verdict = grade(box, SCRIPT, code, ADD, check=CHECK)
        assert (verdict.outcome, verdict.reward) == ("failed", 0.0), code
    assert grade(box, SCRIPT, ADD, check=CHECK).outcome == "passed"  # without a reference


@pytest.mark.parametrize("last", [
    "exec = __import__('os')._exit(0)", "raise SystemExit(0)", "raise SystemExit", "raise StopIteration",
    "raise KeyboardInterrupt", "raise GeneratorExit", "import os, signal; os.kill(1, signal.SIGKILL)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "open('/logs/verifier/reward.txt', 'w').write('1')",
    "import sys; print(1); sys.stdout.flush(); return object()",
    "import ctypes; ctypes.string_at(0)",
])
def test_no_solution_talks_its_way_out(box, last):
    cases = "from solution import add\nassert all(got == 5 for got in map(lambda x: add(x, 3), [2, 2]))\n"
    cases = "from solution import add\nfor got in map(add, [2, 2], [3, 3]):\n    assert got == 5\n" + cases
    verdict = grade(box, SCRIPT, f"def add(a, b):\n    {last}\n", ADD, check=cases)
    assert verdict.outcome == "failed" and verdict.reward == 0.0


def test_a_star_import_brings_the_references_names_alone(box):
    check = "from math import isclose\nfrom solution import *\nassert isclose(add(2, 3), 5) and len([1]) == 1\n"
    assert grade(box, SCRIPT, ADD, ADD, check=check).outcome == "passed"
    cheat = "def add(a, b):\n    return 0\ndef isclose(*x):\n    return True\ndef len(x):\n    return 1\n"
    assert grade(box, SCRIPT, cheat, ADD, check=check).outcome == "failed"


def test_fractions_are_rewards(box):
    assert grade(box, FRACTION, SQUARE, SQUARE).reward == 1.0
    verdict = grade(box, FRACTION, "def square(n):\n    return n * n if n < 4 else 0\n", SQUARE)
    assert (verdict.outcome, verdict.reward, verdict.ending) == ("failed", 0.75, "")
    assert "tests/test.sh gave 0.75" in verdict.output


def test_a_solution_can_be_a_program(box):
    assert grade(box, ECHO, SUMS, SUMS).outcome == "passed"
    for code in (SUMS.replace("sum", "max"), "print('3\\n7', file=open('/dev/null', 'w'))\n", ""):
        assert grade(box, ECHO, code, SUMS).outcome == "failed"
    status = 'python /app/solution.py; [ $? = 3 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > ' \
             '/logs/verifier/reward.txt\n'
    assert grade(box, status, "raise SystemExit(3)\n").outcome == "passed"
    assert grade(box, status, "import os\nos.kill(os.getpid(), 9)\n").outcome == "failed"


def test_each_interpreter_has_a_fresh_solution(box):
    script = "cd /app; a=$(python -c 'import solution; print(solution.count(), solution.count())')\n" \
             "b=$(python -c 'import solution; print(solution.count())')\n" \
             "[ \"$a $b\" = '1 2 1' ] && echo 1 > /logs/verifier/reward.txt\n"
    code = "calls = []\ndef count():\n    calls.append(1)\n    return len(calls)\n"
    assert grade(box, script, code, code).outcome == "passed"


@pytest.mark.parametrize("line, ending", [
    ("true", "RewardFileNotFoundError"), (": > /logs/verifier/reward.txt", "RewardFileEmptyError"),
    ("echo good > /logs/verifier/reward.txt", "VerifierOutputParseError"),
    ("echo 7 > /logs/verifier/reward.txt", "VerifierOutputParseError"),
])
def test_no_readable_reward(box, line, ending):
    script = f"cd /app\nif python -c 'import solution; assert solution.x'; then echo 1 > /logs/verifier/reward.txt\n" \
             f"else {line}; fi\n"
    verdict = grade(box, script, "x = 0\n", "x = 1\n")
    assert (verdict.outcome, verdict.reward, verdict.ending) == ("error", 0.0, ending)
    assert "reward" in verdict.output
    verdict = grade(box, script, "x = 1\n", "x = 0\n")  # the same from the reference: the task is at fault
    assert verdict.outcome == "infra" and "the reference does not pass" in verdict.output and verdict.ending == ""


def test_time_and_memory():
    with Sandbox(workers=1, timeout_s=2.0, memory_mb=256) as box:
        script = f"{SCRIPT}# short\n"
        assert grade(box, script, "def add(a, b):\n    while True: pass\n", ADD, check=CHECK).outcome == "timeout"
        greedy = "def add(a, b):\n    x = bytearray(1 << 30)\n    return a + b\n"
        assert grade(box, script, greedy, ADD, check=CHECK).reward == 0.0
        assert grade(box, script, ADD, ADD, check=CHECK).outcome == "passed"


def test_nothing_is_installed_and_the_script_goes_on(box):
    script = "set -e\napt-get update && apt-get install -y curl\npip install no-such-package-anywhere\n" \
             f"pip3 install -q pytest\n{SCRIPT}"
    verdict = grade(box, script, ADD, check=CHECK)
    assert verdict.outcome == "passed" and verdict.seconds < 8, verdict
    assert "apt-get: no network in the sandbox" in verdict.output
    assert "pip: no network in the sandbox" in verdict.output and "pip3" not in verdict.output


def test_pytest_by_hand(box):
    script = "cd /app\nif python -m pytest -q /tests/cases.py; then echo 1; else echo 0; fi > /tmp/all\n" \
             "tail -n 1 /tmp/all > /logs/verifier/reward.txt\n"
    cases = "import sys\nsys.path.insert(0, '/app')\nfrom solution import add\n" \
            "def test_add():\n    assert add(1, 2) == 3\n"
    assert grade(box, script, ADD, ADD, cases=cases).outcome == "passed"
    assert grade(box, script, "add = max\n", ADD, cases=cases).outcome == "failed"


def test_what_script_and_solution_see_of_each_other(box):
    script = "cd /app\npython -c 'import solution; assert solution.look() == []' && " \
             "! grep -rq secret_word /app /tmp /dev/shm && echo 1 > /logs/verifier/reward.txt\n"
    code = "import os\n# secret_word\ndef look():\n" \
           "    return [path for path in ('/tests', '/logs', '/dev/shm/stub') if os.path.exists(path)]\n"
    verdict = grade(box, script, code, code)
    assert verdict.outcome == "passed", verdict


def test_namespaces_are_needed():
    with Sandbox(workers=1, isolation="none") as box:
        verdict = grade(box, SCRIPT, ADD, ADD, check=CHECK)
    assert verdict.outcome == "infra" and "tests/test.sh needs namespaces" in verdict.output


def test_scripts_are_verified_as_tests_are(box):
    assert quarantine.verify(task(SCRIPT, ADD, check=CHECK), box) == ""
    assert quarantine.verify(task(FRACTION, SQUARE), box) == ""
    assert quarantine.verify(task(ECHO, SUMS), box) == ""
    half = "def square(n):\n    return n * n if n < 3 else 0\n"
    assert quarantine.verify(task(FRACTION, half), box) == "the reference does not pass: tests/test.sh gave 0.5"
    weak = "cd /app; python -c 'import solution' && echo 1 > /logs/verifier/reward.txt\n"
    assert quarantine.verify(task(weak, ADD), box) == "an empty solution passes"
    weak = "cd /app; python -c 'import solution; solution.log(1)' && echo 1 > /logs/verifier/reward.txt\n"
    assert quarantine.verify(task(weak, "def log(x):\n    pass\n"), box).endswith("functions that return None")


def test_the_command_line_takes_a_folder_with_a_script(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text(SCRIPT)
    (tmp_path / "tests" / "check.py").write_text(CHECK)
    (tmp_path / "solution.py").write_text(ADD)
    done = subprocess.run([sys.executable, "sandbox.py", "--solution", str(tmp_path / "solution.py"), "--tests",
                           str(tmp_path / "tests"), "--json"], cwd=Path(__file__).parent.parent, capture_output=True,
                          text=True, timeout=60, check=False)
    assert done.returncode == 0 and '"outcome": "passed", "reward": 1.0, "passed": 1, "total": 1' in done.stdout
