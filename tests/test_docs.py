"""The examples in docstrings and in the README run, and print what they say that they print."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
from pathlib import Path

import pytest

import attn_ext

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = [
    info.name for info in pkgutil.walk_packages(attn_ext.__path__, "attn_ext.") if "__main__" not in info.name
]
WITH_EXAMPLES = {
    "attn_ext.functional",
    "attn_ext._explain",
    "attn_ext.modules.cross_attention",
    "attn_ext.modules.multi_head_attention",
    "attn_ext.modules.scaled_dot_product_attention",
    "attn_ext.modules.self_attention",
}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    if name.endswith("._C"):
        return
    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        failed, attempted = doctest.testmod(module, verbose=False)
    assert failed == 0, report.getvalue()
    assert attempted > 0 or name not in WITH_EXAMPLES


@pytest.mark.parametrize("name", attn_ext.__all__)
def test_public_names_have_docstrings(name):
    if name != "__version__":
        assert getattr(attn_ext, name).__doc__.strip()


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_readme_examples(tmp_path, monkeypatch):
    """Line by line in one session; `print(...)  # text` prints that text."""
    monkeypatch.chdir(tmp_path)
    blocks = readme_blocks("python")
    assert len(blocks) == 5
    session: dict[str, object] = {}
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "README.md", "exec"), session)
        expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert printed.getvalue().splitlines() == expected


def test_readme_cpp_is_from_the_examples():
    """Which CI builds and runs."""
    lines = {
        line.strip()
        for file in (ROOT / "examples/cpp").glob("*.cpp")
        for line in file.read_text().splitlines()
    }
    blocks = readme_blocks("cpp")
    assert len(blocks) == 2
    assert {line.strip() for block in blocks for line in block.splitlines()} <= lines


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "docs/design.md", "docs/reliability.md"]
)
def test_links_and_commands_name_files_that_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    commands = re.findall(
        r"(?:bash|python|pytest) ((?:scripts|tests|benchmarks|examples|\.ci)/[\w./-]+)", text
    )
    for path in links:
        assert (ROOT / document).parent.joinpath(path).exists(), path
    for path in commands:
        assert (ROOT / path).exists(), path
