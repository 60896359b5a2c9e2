"""The examples in docstrings, the README and the guides run, and print what they say that they print."""

import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import pkgutil
import re
from pathlib import Path

import pytest

import attn_ext

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if path.name != "CHANGELOG.md"
)
MODULES = [
    info.name for info in pkgutil.walk_packages(attn_ext.__path__, "attn_ext.") if "__main__" not in info.name
]
WITH_EXAMPLES = {
    "attn_ext.functional",
    "attn_ext._explain",
    "attn_ext.distributed.context_parallel",
    "attn_ext.distributed.cost",
    "attn_ext.distributed.dtensor",
    "attn_ext.distributed.layout",
    "attn_ext.distributed.memory",
    "attn_ext.distributed.plan",
    "attn_ext.distributed.tensor_parallel",
    "attn_ext.integrations.convert",
    "attn_ext.integrations.override",
    "attn_ext.integrations.varlen",
    "attn_ext.modules.cross_attention",
    "attn_ext.modules.multi_head_attention",
    "attn_ext.modules.scaled_dot_product_attention",
    "attn_ext.modules.self_attention",
    "attn_ext.onnx",
    "attn_ext.plot._heads",
    "attn_ext.plot._lines",
    "attn_ext.plot._style",
    "attn_ext.recording._record",
    "attn_ext.recording._recording",
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


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL)


def needs_of(block: str, document: str) -> list[str]:
    before = text_of(document).partition(f"```python\n{block}")[0]
    needed = re.search(r"<!-- needs: (.*?) -->\n\Z", before)
    return needed[1].split() if needed else []


def with_blocks(language: str) -> list[str]:
    return [document for document in DOCUMENTS if blocks(document, language)]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("document", with_blocks("python"))
def test_examples_of_documents(document, tmp_path, monkeypatch):
    """Block by block in one session; `print(...)  # text` prints that text.

    What a document needs beside torch it says in its first line, as in `<!-- needs: transformers -->`;
    what one block needs, in the line before it.
    """
    if needed := re.match(r"<!-- needs: (.*?) -->", text_of(document)):
        for package in needed[1].split():
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {}
    for block in blocks(document, "python"):
        if any(importlib.util.find_spec(package) is None for package in needs_of(block, document)):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, document, "exec"), session)
        expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert printed.getvalue().splitlines() == expected, block


@pytest.mark.parametrize("document", with_blocks("cpp"))
def test_cpp_of_documents_is_from_the_examples(document):
    """Which CI builds and runs."""
    lines = {
        line.strip()
        for file in (ROOT / "examples/cpp").glob("*.cpp")
        for line in file.read_text().splitlines()
    }
    included = re.compile(r'^--8<-- "(.*)"$')
    for line in "".join(blocks(document, "cpp")).splitlines():
        if found := included.match(line):
            assert (ROOT / found[1]).exists()
        else:
            assert line.strip() in lines


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_commands_name_files_that_exist(document):
    text = text_of(document)
    outside_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", outside_code) if "://" not in link]
    commands = re.findall(
        r"(?:bash|python|pytest) ((?:scripts|tests|benchmarks|examples|\.ci)/[\w./-]+)", text
    )
    for path in links:
        assert (ROOT / document).parent.joinpath(path).exists(), path
    for path in commands:
        assert (ROOT / path).exists(), path


def test_results_in_the_readme_are_those_of_the_tables():
    results = text_of("docs/performance.md")
    readme = text_of("README.md")
    for section, sentence in (
        ("Forward", r"forward: ([\d.]+) x as fast in float32 and ([\d.]+) x in bfloat16"),
        ("Backward", r"backward: ([\d.]+) x in float32, ahead everywhere, and ([\d.]+) x in bfloat16"),
    ):
        tables = results.split(f"\n## {section}\n")[1].split("\n## ")[0]
        means = re.findall(r"^geometric mean ([\d.]+) x the best peer", tables, re.MULTILINE)
        assert re.search(sentence, readme).groups() == tuple(means)
    memory = re.findall(
        r"^\| (?:forward|backward) \| attn_ext \|.* (\d+) MiB · [^|]*\|$", results, re.MULTILINE
    )
    assert re.search(r"memory: (\d+) MiB .* backward (\d+) MiB", readme).groups() == tuple(memory)


def test_the_notebook_is_committed_with_outputs_and_nothing_of_this_machine():
    text = text_of("docs/tutorial.ipynb")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}
    assert not re.search(r"/home/|/root/|/tmp/|/work", re.sub(r'"image/png": ".*"', "", text))
    assert len(text) < 400_000
