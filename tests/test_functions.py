"""What the C++ lint says of functions that are too long or take too much."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "check_functions.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the source tree")


@pytest.fixture(scope="module")
def check():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("check_functions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def messages(check, source):
    return [f"{finding.line}: {finding.message}" for finding in check.findings(source)]


def body(lines):
    return "  work();\n" * lines


NINE = "int a, int b, int c, int d, int e, int f, int g, int h, int i"
EIGHT = NINE.removesuffix(", int i")


CONSTRUCTOR = "namespace n {{\nstruct S : B {{\n public:\n  S() : a_{{1}}, b_(2) {{\n{}}}\n}};\n}}\n"
TEMPLATE = "template <class T, class = decltype(f())>\nT\nf(T (*g)(int)) {{\n{}}}\n"
LAMBDA = "void f() {{\n  g([&](int a) {{\n{}  }});\n}}\n"
NO_CODE = 'const char* kText = R"(\nvoid f() {{\n{}}})";\n// void f({});\n#define F(a) \\\n  f({})\n'


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"void f() {{\n{body(58)}}}\n", []),
        (f"void f() {{\n{body(59)}}}\n", ["1: f has 61 lines"]),
        (CONSTRUCTOR.format(body(59)), ["4: S has 61 lines"]),
        (TEMPLATE.format(body(58)), ["2: f has 61 lines"]),
        (LAMBDA.format(body(58)), ["1: f has 62 lines"]),
        (f"TORCH_LIBRARY_IMPL(a, CPU, m) {{\n{body(59)}}}\n", ["1: TORCH_LIBRARY_IMPL has 61 lines"]),
        (NO_CODE.format(body(59), NINE, NINE), []),
        (f"void f({EIGHT});\nvoid g(A<B, C<D, E>> a, int b) {{}}\n", []),
        (f"void f({NINE});\n", ["1: f has 9 parameters"]),
        (f"struct S {{\n  explicit S({NINE}) : a_(a) {{}}\n}};\n", ["2: S has 9 parameters"]),
        (f"template <class... T>\nauto f({NINE}) -> int {{\n}}\n", ["2: f has 9 parameters"]),
        (f"void f() {{\n  g([]({NINE}) {{ h(); }});\n}}\n", ["2: a lambda in f has 9 parameters"]),
        ("int x = f(1, 2, 3, 4, 5, 6, 7, 8, 9);\nint y[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};\n", []),
    ],
)
def test_finds_what_is_too_long_and_what_takes_too_much(check, source, expected):
    assert messages(check, source) == expected


def test_fails_on_a_file_with_such_a_function(tmp_path):
    (tmp_path / "long.h").write_text(f"void f({NINE});\n")
    result = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(f"{tmp_path}/long.h:1: f has 9 parameters\n")
