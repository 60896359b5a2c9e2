"""`attn-ext bench --model`: whole models, timed with attn_ext and without, and what they take."""

import json
import re
import subprocess
import time
import types

import pytest
import torch
from conftest import TORCHVISION
from torch import nn

import attn_ext

pytest.importorskip("transformers")

from attn_ext.benchmark import memory, model_report, models, profile, timing
from attn_ext.cli import main
from attn_ext.commands import bench_models

FACTORIES = '''
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetForImageClassification


def tiny(batch=2, length=16):
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=2)
    ids = torch.randint(3, 64, (batch, length))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def attends(length=300):
    """Little more than attention, so that its memory shows."""
    config = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=16, num_key_value_heads=16)
    return LlamaForCausalLM(config), {"input_ids": torch.zeros(1, length, dtype=torch.long)}


def convolutions():
    return nn.Conv1d(2, 2, 3), torch.randn(1, 2, 8)


def number():
    return 3


def text():
    return nn.Linear(1, 1), "text"


def broken():
    raise NotImplementedError
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("factories") / "mine.py"
    path.write_text(FACTORIES)
    return path


@pytest.fixture(autouse=True)
def ticking(monkeypatch):
    """Every sample takes as long, however busy the machine is that runs the tests."""
    now = iter(range(10**9))
    monkeypatch.setattr(timing, "perf_counter", lambda: next(now) * 2**-13)
    monkeypatch.setattr(timing, "cpu_waits", dict)


def run(*arguments: str) -> int:
    quick = ["--threads", "1", "--rounds", "2", "--block", "0.001", "--new-tokens", "2"]
    return main(["bench", *quick, "--model", *arguments])


class TestCommand:
    def test_times_every_task_both_ways(self, file, capsys, tmp_path):
        numbers = tmp_path / "numbers.json"
        assert run(f"{file}:tiny", "--no-memory", "--json", str(numbers)) == 0
        printed = capsys.readouterr().out
        assert re.search(r"^task +sdpa +attn_ext +faster +spread$", printed, re.M)
        for task in models.TASKS:
            assert re.search(rf"^{task}( +[\d.]+ [mµ]s){{2}} +[\d.]+ x +\d+%$", printed, re.M)
        assert f"{file}:tiny, float32, input_ids 2 x 16" in printed
        difference = re.search(r"outputs differ by (\S+) of their largest", printed)
        assert 0 < float(difference[1]) < 1e-5
        results = json.loads(numbers.read_text())["results"]
        assert [result["task"] for result in results] == list(models.TASKS)

    def test_in_another_dtype_and_size_with_eager(self, file, capsys):
        sizes = [
            "--dtype",
            "bfloat16",
            "--batch",
            "1",
            "--length",
            "5",
            "--eager",
            "--markdown",
            "--no-memory",
        ]
        assert run(f"{file}:tiny", *sizes, "--task", "inference") == 0
        printed = capsys.readouterr().out
        assert "| task | sdpa | attn_ext | eager | faster | spread |" in printed
        assert "bfloat16, input_ids 1 x 5**" in printed

    def test_shows_memory_beside_the_times(self, file, capsys, monkeypatch):
        megabytes = {"sdpa": 12, "attn_ext": 7}
        monkeypatch.setattr(memory, "peak", lambda spec, task, name, threads: megabytes[name] * 1_000_000)
        assert run(f"{file}:tiny", "--task", "inference") == 0
        assert re.search(r"^inference .* 12 +7$", capsys.readouterr().out, re.M)

    def test_shows_where_the_time_goes(self, file, capsys, tmp_path):
        """A row for each task and contender, whose parts are all of the time."""
        numbers = tmp_path / "numbers.json"
        assert run(f"{file}:tiny", "--no-memory", "--profile", "--json", str(numbers)) == 0
        printed = capsys.readouterr().out
        kinds = " +".join(profile.KINDS)
        assert re.search(rf"where the time goes\n\ntask, attention by +{kinds}$", printed, re.M)
        for task in models.TASKS:
            for name in ("sdpa", "attn_ext"):
                assert re.search(rf"^{task}, {name}( +\d+%){{5}}$", printed, re.M)
        for result in json.loads(numbers.read_text())["results"]:
            for parts in result["shares"].values():
                assert list(parts) == list(profile.KINDS)
                assert sum(parts.values()) == pytest.approx(1)

    def test_the_model_has_its_own_attention_between(self, file, monkeypatch):
        """And ours is really called in our blocks, and in no others."""
        seen = []
        original = models.integration.attention_forward
        workload = models.load(models.Spec(f"{file}:tiny"))
        contenders = models.Contenders(workload.model)
        monkeypatch.setattr(
            models.integration, "attention_forward", lambda *a, **k: seen.append(1) or original(*a, **k)
        )
        models.integration.register()
        try:
            with contenders.changing() as change:
                for name, calls in [("sdpa", 0), ("attn_ext", 1), ("sdpa", 1), ("eager", 1), ("attn_ext", 2)]:
                    change(name)
                    workload.prepare("inference")()
                    assert len(seen) == calls
            assert workload.model.config._attn_implementation == "sdpa"
        finally:
            monkeypatch.undo()
            models.integration.register()

    def test_models_of_other_libraries_are_converted_too(self, file, monkeypatch):
        """By `attn_ext.convert`, and put back by its report."""
        done = []
        report = types.SimpleNamespace(undo=lambda: done.append("undone"))
        monkeypatch.setattr(
            attn_ext, "convert", lambda model: done.append(type(model)) or report, raising=False
        )
        workload = models.load(models.Spec(f"{file}:convolutions"))
        contenders = models.Contenders(workload.model)
        assert contenders.default == "default"
        with contenders.using("attn_ext"):
            assert done == [nn.Conv1d]
        assert done == [nn.Conv1d, "undone"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["bert-bse"],
                r"there is no model 'bert-bse' \(did you mean bert-base or .*\); there are bert-base, ",
            ),
            (
                ["{file}:tinny"],
                r"mine.py has no function 'tinny' \(did you mean tiny\?\); its functions are tiny, ",
            ),
            (["{file}"], r"mine.py has to be followed by :factory; its functions are tiny, "),
            (["{folder}/mne.py:tiny"], r"there is no file .*mne.py \(did you mean .*mine.py\?\)"),
            (["{file}:number"], r"number should return \(nn.Module, inputs\), got int"),
            (["{file}:text"], r"text should return its inputs as a dict or a tuple, got str"),
            (["{file}:convolutions"], "a model with attention, but found none among the 1 modules of Conv1d"),
            (["{file}:convolutions", "--batch", "3"], "takes no --batch: its factory has no parameter"),
            (
                ["{file}:convolutions", "--task", "generation"],
                "has no generation: it can do inference and train",
            ),
            (["gpt2", "--cells", "tiny"], "--cells goes with the grid of cells, not with --model"),
        ],
    )
    def test_says_what_is_wrong_in_a_sentence(self, file, capsys, arguments, message):
        filled = [text.format(file=file, folder=file.parent) for text in arguments]
        assert run(*filled) == 2
        printed = capsys.readouterr().err
        assert re.search(f"^attn-ext: .*{message}", printed), printed
        assert printed.count("\n") == 1

    def test_options_of_models_want_a_model(self, capsys):
        assert main(["bench", "--length", "3"]) == 2
        assert "--length goes with --model alone" in capsys.readouterr().err

    def test_a_file_that_does_not_run(self, tmp_path, capsys):
        (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
        assert run(f"{tmp_path}/broken.py:make") == 2
        assert "broken.py cannot be imported: ModuleNotFoundError: No module" in capsys.readouterr().err


class TestProfile:
    def test_counts_an_operator_as_the_outermost_one(self):
        """A mask made for attention is attention's, one made before it is not; backward counts."""
        x = torch.randn(1, 2, 600, 16, requires_grad=True)
        square = torch.randn(600, 600, requires_grad=True)  # so much to multiply that no pause outweighs it

        def attend():
            attn_ext.sdpa(x, x, x, is_causal=True).sum().backward()

        def multiply():
            with torch.profiler.record_function("named::by a user"):
                (square @ square).sum().backward()

        def copy():
            torch.ones(600, 600, dtype=torch.bool).tril().clone().logical_not()

        for call, kind in [(attend, "attention"), (multiply, "matrix products"), (copy, "copies and masks")]:
            call()
            shares = profile.shares(call)
            del shares["between operators"]
            assert max(shares, key=shares.get) == kind, shares

    def test_sees_time_between_operators(self):
        shares = profile.shares(lambda: (torch.ones(1), time.sleep(0.1)))
        assert shares["between operators"] > 0.9


class TestMemory:
    @pytest.mark.skipif(
        TORCHVISION is not None, reason="a process of its own imports no transformers beside this torchvision"
    )
    def test_sees_what_attention_holds(self, file):
        """Eager holds 16 x 2000 x 2000 scores, 256 MB, more than once; ours holds none."""
        spec = models.Spec(f"{file}:attends", length=2000)
        peaks = {name: memory.peak(spec, "inference", name, 1) for name in ("eager", "attn_ext")}
        assert peaks["eager"] > 256e6
        assert peaks["attn_ext"] < 100e6

    def test_a_process_says_why_it_has_no_figure(self, file):
        work = {"spec": {"name": f"{file}:none"}, "task": "inference", "contender": "sdpa", "threads": 1}
        with pytest.raises(SystemExit, match="no function 'none'"):
            memory.main(json.dumps(work))

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            ("import sys; sys.exit('first\\nlast')", "last"),
            ("import os; os.abort()", "killed by signal 6, as for"),
        ],
    )
    def test_a_process_that_fails_has_no_figure(self, code, reason, monkeypatch):
        python = subprocess.run
        monkeypatch.setattr(subprocess, "run", lambda command, **how: python([command[0], "-c", code], **how))
        assert memory.peak(models.Spec("gpt2"), "inference", "sdpa", 1).startswith(reason)


class TestModels:
    def test_names_are_what_the_task_asks_for(self):
        assert list(models.FACTORIES) == [
            "bert-base",
            "gpt2",
            "llama-1b",
            "vit-base",
            "whisper-small",
            "t5-small",
        ]

    @pytest.mark.parametrize("name", ["bert-base", "gpt2", "vit-base", "whisper-small", "t5-small"])
    @pytest.mark.slow
    def test_do_their_tasks_and_agree(self, name):
        spec = models.Spec(name, batch=1, new_tokens=2, length=None if name == "vit-base" else 16)
        workload = models.load(spec)
        contenders = models.Contenders(workload.model)
        assert contenders.default == "sdpa"
        assert bench_models.output_difference(workload, contenders) < 1e-4
        with contenders.using("attn_ext"):
            for task in workload.tasks:
                workload.prepare(task)()

    def test_a_model_that_returns_a_tensor(self, file):
        workload = models.load(models.Spec(f"{file}:convolutions"))
        assert workload.tasks == ["inference", "training"]
        workload.prepare("training")()
        assert workload.model.weight.grad is not None
        assert workload.model.training


class TestReport:
    def result(self, **changes) -> model_report.Result:
        usual = {"seconds": {"sdpa": 2.0, "attn_ext": 1.0}, "spread": {"sdpa": 0.01, "attn_ext": 0.02}}
        return model_report.Result("m", "float32", "inference", "x 2 x 3", **{**usual, **changes})

    def test_a_row(self):
        table = model_report.as_table([self.result(memory={"sdpa": 3_000_000, "attn_ext": 2_000_000})])
        assert table.splitlines()[3].split() == [
            "inference",
            "2000",
            "ms",
            "1000",
            "ms",
            "2.00",
            "x",
            "2%",
            "3",
            "2",
        ]

    def test_rough_and_stalled_figures_are_marked(self):
        rough = self.result(spread={"sdpa": 0.3, "attn_ext": 0.0})
        stalled = self.result(seconds={"sdpa": None, "attn_ext": 1.0}, spread={"sdpa": None, "attn_ext": 0.0})
        assert "~2.00 x" in model_report.as_table([rough])
        assert stalled.ratio is None
        assert "stalled" in model_report.as_table([stalled])
        warning = model_report.warning([rough, stalled, self.result(memory={"sdpa": "killed"})])
        assert "blocks of sdpa differ by 30%" in warning
        assert "sdpa stalled" in warning
        assert "memory of sdpa: killed" in warning
        assert model_report.warning([self.result()]) is None


def test_inputs_in_words():
    inputs = {"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2, 3), "flag": True}
    assert bench_models.in_words(inputs) == "input_ids 2 x 3"
    assert bench_models.in_words((torch.zeros(4), nn.Linear)) == "0 4"
