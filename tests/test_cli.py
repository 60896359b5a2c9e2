"""`attn-ext demo` and `attn-ext info`: what they print, what they draw, and what they refuse in one line."""

import re
import shlex
import subprocess
import sys

import pytest
import torch

import attn_ext
from attn_ext import plot
from attn_ext._text import columns
from attn_ext.cli import main
from attn_ext.commands import demo

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class TestDemo:
    @pytest.mark.parametrize("kind", demo.KINDS)
    @pytest.mark.parametrize("dtype", demo.DTYPES)
    def test_prints_a_table_accuracy_path_and_picture(self, capsys, tmp_path, kind, dtype):
        assert main(["demo", "--kind", kind, "--dtype", dtype, "--out", "heat.png"]) == 0
        printed = capsys.readouterr().out
        for word in demo.TEXT.split():
            assert re.search(rf"^{word} +\w+ +\d+%", printed, re.MULTILINE)
        accuracy = re.search(r"output within (\S+) of the float64 reference, weights within (\S+)", printed)
        bound = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3}[dtype]
        assert all(float(number) < bound for number in accuracy.groups())
        assert re.search(r"^path +[\w-]+ \(\w+\): ", printed, re.MULTILINE)
        assert "heat.png" in printed
        assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")

    def test_default_picture_is_attention_png(self, tmp_path):
        assert main(["demo"]) == 0
        assert (tmp_path / "attention.png").stat().st_size > 10_000

    def test_is_the_same_every_time_and_leaves_the_generator_alone(self, capsys):
        state = torch.get_rng_state()
        main(["demo"])
        first = capsys.readouterr().out
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(1)
        main(["demo"])
        assert capsys.readouterr().out == first

    def test_table_names_the_largest_weights(self, capsys):
        weights = torch.tensor([[[0.7, 0.1, 0.2], [0.0, 0.95, 0.05], [0.3, 0.3, 0.4]]])
        demo.print_table(weights, ["a", "b", "c"], ["x", "y", "z"])
        rows = capsys.readouterr().out.splitlines()
        assert rows[1].split() == ["a", "x", "70%", "z", "20%", "y", "10%"]
        assert rows[2].split() == ["b", "y", "95%", "z", "5%", "x", "0%"]

    def test_table_takes_the_mean_of_the_heads(self, capsys):
        demo.print_table(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]), ["a"], ["x", "y"])
        header, row = capsys.readouterr().out.splitlines()
        assert "mean of the heads" in header
        assert row.split() == ["a", "x", "75%", "y", "25%"]

    def test_weights_are_those_of_the_module(self):
        words = demo.TEXT.split()
        attention = demo.attend("multihead", 3, words, words, torch.float32)
        assert attention.weights.shape == (3, 9, 9)
        torch.testing.assert_close(attention.weights.sum(-1), torch.ones(3, 9))

    def test_reads_a_file(self, capsys, tmp_path):
        (tmp_path / "text.txt").write_text("Ünïcode wörds, and don't-split-me\nover lines", encoding="utf-8")
        assert main(["demo", "--file", "text.txt"]) == 0
        printed = capsys.readouterr().out
        for word in ("Ünïcode", "wörds", ",", "don't-split-me", "lines"):
            assert f"\n{word}" in printed

    def test_cross_takes_a_context(self, capsys):
        assert main(["demo", "--kind", "cross", "--text", "one two", "--context", "alpha beta gamma"]) == 0
        printed = capsys.readouterr().out
        assert "2 words attending to 3 words" in printed
        assert re.search(r"^one +(alpha|beta|gamma)", printed, re.MULTILINE)

    def test_one_word_attends_to_itself(self, capsys):
        assert main(["demo", "--kind", "self", "--text", "alone"]) == 0
        assert re.search(r"^alone +alone +100%", capsys.readouterr().out, re.MULTILINE)

    def test_words_that_come_again_are_numbered(self):
        assert demo.numbered(["a", "b", "a", "a"]) == ["a", "b", "a·2", "a·3"]

    def test_a_long_text_is_cut_and_said_to_be(self, capsys, tmp_path):
        (tmp_path / "long.txt").write_text("word " * 5000)
        assert main(["demo", "--kind", "self", "--file", "long.txt"]) == 0
        printed = capsys.readouterr().out
        assert f"long.txt holds 5000 words; the first {demo.MAX_WORDS} are taken" in printed
        assert f"... and {demo.MAX_WORDS - demo.TABLE_ROWS} words more" in printed

    @pytest.mark.parametrize("kind", ["png", "svg", "pdf", "jpg"])
    def test_picture_kinds(self, tmp_path, kind):
        pytest.importorskip("PIL" if kind == "jpg" else "matplotlib")
        assert main(["demo", "--out", f"heat.{kind}"]) == 0
        assert (tmp_path / f"heat.{kind}").stat().st_size > 1000

    def test_without_matplotlib_the_table_is_printed(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert main(["demo"]) == 0
        printed = capsys.readouterr().out
        assert re.search(r"^quick +\w+ +\d+%", printed, re.MULTILINE)
        assert printed.endswith(
            "picture   none: the picture takes matplotlib; to have it: pip install 'attn_ext[plot]'\n"
        )
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
    @pytest.mark.parametrize(
        "text",
        [demo.TEXT, "注意機構は長い文章でも動く " * 3, "antidisestablishmentarianism " * 5 + "👩‍👩‍👧‍👦 é"],
    )
    def test_rows_of_the_table_fit_into_the_terminal(self, capsys, monkeypatch, width, text):
        monkeypatch.setenv("COLUMNS", str(width))
        words = demo.numbered(text.split())
        demo.print_table(torch.rand(2, len(words), len(words)).softmax(-1), words, words)
        rows = capsys.readouterr().out.splitlines()
        assert len(rows) == len(words) + 1
        assert max(map(columns, rows)) <= width
        assert len({columns(row) for row in rows[1:]}) == 1

    def test_a_missing_font_is_named_in_a_line(self, capsys, monkeypatch):
        monkeypatch.setattr(plot._style, "missing_glyphs", lambda texts: ["注"])
        assert main(["demo", "--text", "注意"]) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert line.strip().startswith(
            "no installed font has 注: they are drawn as boxes; a font such as Noto Sans CJK"
        )

    def test_markup_in_a_text_is_drawn_as_it_is(self):
        assert main(["demo", "--text", r"$x^2$ costs \frac $5 & <b>more</b> 注意 _"]) == 0


class TestRefusals:
    CASES = {
        "a missing file": (["--file", "nowhere.txt"], "cannot read nowhere.txt: No such file or directory"),
        "a folder": (["--file", "."], "cannot read .: Is a directory"),
        "a file that is no text": (["--file", "bytes.bin"], "cannot read bytes.bin: it is not text in UTF-8"),
        "an empty file": (["--file", "empty.txt"], "empty.txt holds no words"),
        "empty text": (["--text", ""], "--text holds no words"),
        "blank text": (["--text", " \n "], "--text holds no words"),
        "empty context": (["--kind", "cross", "--context", ""], "--context holds no words"),
        "text and file": (["--text", "a", "--file", "b"], "not allowed with argument --text"),
        "an unknown extension": (["--out", "a.xyz"], "cannot write a.xyz as a picture: '.xyz' is not one of"),
        "no extension": (["--out", "picture"], "cannot write picture as a picture: it has no extension"),
        "no such folder": (
            ["--out", "no/such/a.png"],
            "cannot write no/such/a.png: there is no folder no/such",
        ),
        "a folder as picture": (["--out", "folder.png"], "cannot write folder.png: it is a folder"),
        "no heads": (["--heads", "0"], "--heads must be between 1 and 64, got 0"),
        "negative heads": (["--heads", "-3"], "--heads must be between 1 and 64, got -3"),
        "many heads": (["--heads", "1000"], "--heads must be between 1 and 64, got 1000"),
        "heads that are no number": (["--heads", "four"], "argument --heads: invalid int value: 'four'"),
        "heads of one head": (["--kind", "self", "--heads", "2"], "--heads goes with --kind multihead"),
        "context without cross": (["--context", "a"], "--context goes with --kind cross, not with multihead"),
        "an unknown dtype": (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        "an unknown kind": (["--kind", "sparse"], "argument --kind: invalid choice: 'sparse'"),
    }

    @pytest.mark.parametrize("case", CASES)
    def test_one_line_and_exit_code_2(self, capsys, tmp_path, case):
        arguments, message = self.CASES[case]
        (tmp_path / "empty.txt").write_text("")
        (tmp_path / "bytes.bin").write_bytes(b"\xff\xfe\x00\x80")
        (tmp_path / "folder.png").mkdir()
        assert exit_code(["demo", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""
        assert not (tmp_path / "attention.png").exists()

    def test_a_picture_that_cannot_be_written_after_all(self, capsys, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(plot, "save", full)
        assert exit_code(["demo"]) == 2
        assert capsys.readouterr().err == "attn-ext: cannot write attention.png: No space left on device\n"

    def test_matplotlib_missing(self, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert exit_code(["demo", "--out", "a.png"]) == 2
        message = "the picture takes matplotlib; to have it: pip install 'attn_ext[plot]'"
        assert capsys.readouterr().err == f"attn-ext: {message}\n"

    @pytest.mark.parametrize("arguments", [[], ["dance"], ["info", "--what"]])
    def test_bad_command(self, capsys, arguments):
        assert exit_code(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


class TestInfo:
    def test_prints_versions_instruction_sets_threads_and_compiler(self, capsys):
        assert main(["info"]) == 0
        printed = capsys.readouterr().out
        assert attn_ext.__version__ in printed
        assert f"{torch.__version__}, built against" in printed
        assert f"{attn_ext.cpu_capability()} (available: " in printed
        sets = attn_ext.available_cpu_capabilities()
        assert ("amx by vectors" in printed) == ("amx" in sets and sets[-1] != "amx")
        assert re.search(rf"^threads +{torch.get_num_threads()}$", printed, re.MULTILINE)
        assert re.search(r"^compiler +\w+ \d+", printed, re.MULTILINE)

    def test_version(self, capsys):
        assert exit_code(["--version"]) == 0
        assert capsys.readouterr().out == f"attn_ext {attn_ext.__version__}\n"


def test_python_dash_m(tmp_path):
    command = [sys.executable, "-m", "attn_ext", "demo", "--file", "nowhere.txt"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "attn-ext: cannot read nowhere.txt: No such file or directory\n"


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    command = f"{shlex.quote(sys.executable)} -u -m attn_ext demo --kind self | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def exit_code(arguments: list[str]) -> int:
    """What the shell would get."""
    try:
        return main(arguments)
    except SystemExit as leaving:
        return leaving.code
