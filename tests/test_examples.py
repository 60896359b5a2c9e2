"""The programs of `examples/` and `benchmarks/`, at a size that takes a moment."""

import argparse
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from attn_ext.benchmark import timing
from attn_ext.commands import bench

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def load(path: str) -> types.ModuleType:
    """A program as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _threads_are_put_back():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class TestCharLM:
    SMALL = ["--dim", "32", "--layers", "1", "--context", "32", "--batch", "4", "--threads", "1"]

    @pytest.fixture
    def char_lm(self):
        pytest.importorskip("matplotlib")
        return load("examples/char_lm.py")

    @pytest.fixture
    def run(self, char_lm, tmp_path):
        text = tmp_path / "text.txt"
        text.write_text("the quick brown fox jumps over a lazy dog. \N{MICRO SIGN}\n" * 50, encoding="utf-8")
        common = [*self.SMALL, "--text", str(text), "--prompt", "the ", "--characters", "20"]
        return lambda *more, out="out": char_lm.main([*common, "--out", str(tmp_path / out), *more])

    def test_trains_draws_and_writes(self, run, tmp_path, capsys):
        run("--steps", "60")
        printed = capsys.readouterr().out
        assert float(re.search(r"loss +([\d.]+) after 60 steps", printed)[1]) < 3
        assert printed.splitlines()[-1].startswith("the ")
        assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")

    def test_a_resumed_run_is_the_uninterrupted_one(self, run, tmp_path):
        run("--steps", "12", out="whole")
        run("--steps", "5", out="parts")
        run("--steps", "12", "--resume", out="parts")
        whole, parts = (torch.load(tmp_path / out / "checkpoint.pt") for out in ("whole", "parts"))
        assert len(whole["losses"]) == 12
        assert whole["losses"] == parts["losses"]

    def test_losses_agree_with_those_of_f_sdpa_step_by_step(self, run, tmp_path, capsys):
        run("--steps", "25", "--compare")
        printed = capsys.readouterr().out
        assert float(re.search(r"largest difference (\S+),", printed)[1]) < 1e-4
        assert (tmp_path / "out/compare.png").exists()

    def test_f_sdpa_can_be_trained_alone(self, run, tmp_path):
        run("--steps", "2", "--attention", "sdpa")
        assert torch.load(tmp_path / "out/checkpoint.pt")["config"]["attention"] == "sdpa"

    def test_the_scripted_model_stands_alone_and_predicts_the_same(self, char_lm, run, tmp_path):
        run("--steps", "3")
        scripted = torch.jit.load(tmp_path / "out/model.pt")
        model = char_lm.Run.load(tmp_path / "out/checkpoint.pt").model
        characters = torch.randint(len(model.alphabet), (2, 9))
        torch.testing.assert_close(scripted(characters), model(characters))
        assert scripted.complete("the ", 9, 0.0) == model.complete("the ", 9, 0.0)

    @pytest.mark.parametrize("arguments", [["--resume"], ["--context", "100000"]])
    def test_refuses_what_cannot_be(self, run, capsys, arguments):
        with pytest.raises(SystemExit) as stop:
            run(*arguments)
        assert stop.value.code == 2
        assert re.search(
            r"there is no .*checkpoint\.pt to resume|expected at least 200000", capsys.readouterr().err
        )


class TestTrainingStep:
    @pytest.fixture
    def training_step(self):
        return load("benchmarks/training_step.py")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_prints_a_row_for_each_layer(self, training_step, capsys, monkeypatch, dtype):
        monkeypatch.setattr(timing, "perf_counter", itertools.count().__next__)  # however busy the machine is
        monkeypatch.setattr(timing, "cpu_waits", dict)
        small = {
            name: training_step.Setting(setting.make, (2, 49, setting.input[-1]), setting.padded)
            for name, setting in training_step.SETTINGS.items()
        }
        monkeypatch.setattr(training_step, "SETTINGS", small)
        training_step.main(["--dtype", dtype, "--rounds", "2", "--block", "0.001", "--threads", "1"])
        rows = re.findall(
            r"^\| (\S+) +\| (\S+) +\| +[\d.]+ \| +[\d.]+ \| +1.00 x \| +0% \|$", capsys.readouterr().out, re.M
        )
        assert rows == [(name, dtype) for name in small]

    def test_a_row_of_what_stalled_has_no_ratio(self, training_step):
        steady = timing.Timing(print, [timing.Block([1e-3]), timing.Block([1.2e-3])])
        stalled = timing.Timing(print, [timing.Block([1e-3], waiting=0.5)])
        assert training_step.as_row({"ours": steady, "theirs": stalled}) == ["1.10", "stalled", "-", "9%"]
        assert training_step.as_row({"ours": stalled, "theirs": stalled}) == ["stalled", "stalled", "-", "-"]

    def test_steps_of_both_attentions_agree(self, training_step):
        setting = training_step.Setting(training_step.SETTINGS["swin"].make, (2, 49, 128))
        training_step.check(training_step.make_steps(setting, torch.float32, 0.0), torch.float32, 0.0)


class TestTables:
    """`benchmarks/tables.sh`, with an interpreter that notes what it is asked for and measures nothing."""

    STUB = """#!{python}
import pathlib, sys
here, words = pathlib.Path(__file__).parent, sys.argv[1:]
if words[0] == "-c" and "matplotlib" in words[1]:
    sys.exit((here / "no_matplotlib").exists())
elif words[0] == "-c":
    print("baseline" if (here / "no_avx2").exists() else "baseline avx2")
else:
    with open(here / "calls", "a") as calls:
        print(*words, sep="\\t", file=calls)
    if "bench" in words:
        print((here / "says").read_text() if (here / "says").exists() else "| tiny | 1.00 x |")
    sys.exit("weights" in words and (here / "no_weights").exists())
"""

    @pytest.fixture
    def tables(self, tmp_path):
        stub = tmp_path / "python"
        stub.write_text(self.STUB.format(python=sys.executable))
        stub.chmod(0o755)

        def run(*notes: str, says: str = "") -> subprocess.CompletedProcess:
            for note in notes:
                (tmp_path / note).touch()
            if says:
                (tmp_path / "says").write_text(says)
            command = ["bash", ROOT / "benchmarks/tables.sh", tmp_path / "tables", "--threads", "3"]
            environment = {**os.environ, "PYTHON": str(stub)}
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

        run.calls = lambda: [line.split("\t") for line in (tmp_path / "calls").read_text().splitlines()]
        run.folder = tmp_path / "tables"
        return run

    def test_makes_every_part_and_says_that_nothing_is_left_out(self, tables):
        done = tables()
        assert done.returncode == 0
        assert re.search(r"^All (\d+) tables are in .*, with nothing left out\.$", done.stdout, re.M)
        calls = tables.calls()
        assert len(calls) == len(list(tables.folder.glob("*.md"))) == 3 * 10 + 2
        *benches, memory, training = calls
        assert memory[0].endswith("memory.py")
        assert training[0].endswith("training_step.py")
        assert all("--plot" in call and call[-2:] == ["--threads", "3"] for call in benches)
        assert "--cells\tdecode*" in "\t".join(benches[7])

    def test_the_commands_are_those_that_bench_takes(self, tables):
        tables()
        parser = argparse.ArgumentParser()
        bench.add_parser(parser.add_subparsers())
        for call in tables.calls()[:-2]:
            arguments = parser.parse_args(call[2:])
            assert bench.choose_problems(arguments)

    def test_shows_how_far_it_is(self, tables):
        lines = re.findall(
            r"^\[(#*)(-*)\] (\d+) of 32 parts done, \d+ min; now (\S+)$", tables().stderr, re.M
        )
        assert [int(line[2]) for line in lines] == [*range(33)]
        assert {len(line[0] + line[1]) for line in lines} == {30}
        assert [lines[0][3], lines[-2][3], lines[-1][3]] == ["forward-float32", "training-step", "nothing"]

    def test_says_what_it_leaves_out(self, tables):
        missing = "not installed, so left out: openvino; to have them: pip install openvino"
        done = tables("no_matplotlib", "no_avx2", says=f"{missing}\n\n| tiny | stalled |")
        assert done.returncode == 0
        assert "pictures: matplotlib is not installed; to have them: pip install matplotlib" in done.stdout
        assert "avx2-bfloat16: there is no avx2 on this machine, only baseline" in done.stdout
        assert done.stdout.split("Left out:")[1].count(missing) == 1
        assert "forward-float32: has cells without a figure (stalled)" in done.stdout
        assert not any("--plot" in call or "--capability" in call for call in tables.calls())

    def test_a_part_that_fails_stops_no_other(self, tables):
        done = tables("no_weights")
        assert done.returncode == 1
        assert len(tables.calls()) == 32
        assert re.findall(r"^  (\S+): it failed, see above: ", done.stdout, re.M) == [
            f"weights-{dtype}" for dtype in ("float32", "bfloat16", "float16")
        ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_prints_a_row_for_each_attention():
    command = [sys.executable, ROOT / "benchmarks/memory.py", "--calls", "forward", "--lengths", "64", "128"]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = re.findall(r"^\| forward \| (\S+) \|( \d+ MiB · [\d.]+ s \|){2}$", table, re.M)
    assert [name for name, _ in rows] == ["attn_ext", "plain"]


def test_two_builds_are_timed_against_each_other():
    builds = [ROOT, ROOT]
    few = ["--cells", "tiny", "--modes", "fwd", "--dtype", "float32", "--pairs", "1", "--rounds", "1"]
    command = [sys.executable, ROOT / "benchmarks/compare_builds.py", *builds, *few, "--block", "0.01"]
    printed = subprocess.run([*command, "--most", "100"], capture_output=True, text=True, check=True).stdout
    assert "| tiny | fwd | float32 |" in printed
    assert "1 cells; slower by more than 10000%: none" in printed
    assert subprocess.run([*command, "--most", "-1"], capture_output=True, check=False).returncode == 1
