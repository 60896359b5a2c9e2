"""The programs of `examples/` and `benchmarks/`, at a size that takes a moment."""

import argparse
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import attn_ext
from attn_ext.benchmark import cells, peers, timing
from attn_ext.commands import bench, bench_batches

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


class TestLongContext:
    SMALL = ["--context", "96", "--dim", "16", "--heads", "2", "--kv-heads", "1", "--layers", "1"]

    @pytest.fixture
    def arguments(self, tmp_path):
        text = tmp_path / "text.txt"
        text.write_text("the quick brown fox jumps over a lazy dog.\n" * 20, encoding="utf-8")
        return lambda out, *more: [*self.SMALL, "--text", str(text), "--out", str(tmp_path / out), *more]

    @pytest.fixture
    def long_context(self):
        return load("examples/long_context.py")

    def test_two_processes_and_then_one_train_as_one(self, long_context, arguments, tmp_path, capfd):
        long_context.main(arguments("one", "--steps", "8"))
        program = [str(ROOT / "examples/long_context.py"), *arguments("both", "--steps", "5")]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*torchrun, *program], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert "2 processes of 48, 48 rows; steps 1 to 5" in capfd.readouterr().out
        long_context.main(arguments("both", "--steps", "8", "--resume"))
        assert "1 processes of 96 rows; steps 6 to 8" in capfd.readouterr().out
        one, both = (
            [float(line) for line in (tmp_path / out / "losses.txt").read_text().split()]
            for out in ("one", "both")
        )
        assert len(one) == 8
        assert one[-1] < one[0]
        assert both == pytest.approx(one, rel=1e-5, abs=1e-5)
        states = [torch.load(tmp_path / out / "checkpoint.pt")["model"] for out in ("one", "both")]
        for name, expected in states[0].items():
            torch.testing.assert_close(states[1][name], expected, rtol=1e-3, atol=1e-4)

    @pytest.mark.skipif(sys.platform != "linux", reason="reads the threads' names from /proc")
    def test_its_group_is_gone_at_the_end(self, arguments):
        """A thread of gloo that is left when Python ends may abort the process."""
        program = """
import pathlib, runpy, sys
runpy.run_path(sys.argv[1])["main"](sys.argv[2:])
print("threads:", *(path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")))
"""
        command = [sys.executable, "-c", program, ROOT / "examples/long_context.py"]
        command += arguments("out", "--steps", "2")
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert "threads: " in done.stdout and "gloo" not in done.stdout

    @pytest.mark.parametrize("more", [["--resume"], ["--context", "100000"]])
    def test_refuses_what_cannot_be(self, long_context, arguments, capsys, more):
        with pytest.raises(SystemExit) as stop:
            long_context.main(arguments("out", *more))
        assert stop.value.code == 2
        assert re.search(
            r"there is no .*checkpoint\.pt to resume|expected at least 100002", capsys.readouterr().err
        )


class TestScaling:
    @pytest.fixture(scope="class")
    def scaling(self):
        return load("benchmarks/scaling.py")

    @pytest.fixture
    def machines(self, scaling):
        """A thread that does 100 GFLOP/s, of a call of few rows the tenth of it."""
        rates = {4: scaling.Rate(1e10, 1e10), 64: scaling.Rate(1e11, 1e11)}
        found = scaling.Measured(torch.bfloat16, scaling.CELL, rates, 1e-4, 1e9, {scaling.THREADS: 2.0})
        return scaling.machines_of(found, cores=32)

    def test_measures_and_writes_a_page(self, tmp_path):
        pytest.importorskip("matplotlib")
        command = [sys.executable, ROOT / "benchmarks/scaling.py", "--quick", "--rounds", "1"]
        command += ["--out", tmp_path / "scaling.md"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", env=environment)
        assert re.search(r"^gloo: \d+ µs, [\d.]+ GB/s$", done.stdout, re.M)
        page = (tmp_path / "scaling.md").read_text(encoding="utf-8")
        assert re.search(r"^\| against one thread: two processes, ring \| [\d.]+ x \|$", page, re.M)
        assert re.search(r"^\| 1 M \| 100 % \|", page, re.M)
        assert (tmp_path / "pictures/scaling.png").read_bytes().startswith(b"\x89PNG")

    def test_efficiency_falls_with_ranks_and_grows_with_length(self, scaling, machines):
        for machine in machines:
            by_ranks = [scaling.efficiency("ring", 2**15, n, machine) for n in (1, 8, 64, 512)]
            assert by_ranks == sorted(by_ranks, reverse=True)
            assert by_ranks[0] == 1
            by_length = [scaling.efficiency("ring", length, 64, machine) for length in scaling.LENGTHS]
            assert by_length == sorted(by_length)

    def test_auto_is_as_good_as_each_method(self, scaling, machines):
        for ranks in (2, 8, 64, 1024):
            auto = scaling.efficiency("auto", 2**17, ranks, machines[3])
            for method in scaling.METHODS:
                assert auto >= (scaling.efficiency(method, 2**17, ranks, machines[3]) or 0) - 0.01

    def test_time_of_one_rank_is_that_of_its_flops(self, scaling, machines):
        length, machine = 2**13, machines[1]
        flops = 2 * (128 + 128) * 32 * length * (length + 1) // 2
        expected = 2 * flops / 1e11 / 32
        assert scaling.seconds(scaling.Way("allgather", 1), length, 1, machine) == pytest.approx(expected)

    def test_time_of_two_ranks_is_computing_and_sending(self, scaling, machines):
        """By hand: keys and values of half of the rows in bfloat16, their gradients back in float32."""
        length, machine = 2**13, machines[1]
        flops = 2 * (128 + 128) * 32 * length * (length + 1) // 2 / 2
        sent = length // 2 * 8 * (128 + 128) * (2 + 4)
        expected = 2 * flops / 1e11 / 32 + sent / machine.network.bandwidth + 3 * machine.network.latency
        assert scaling.seconds(scaling.Way("allgather", 1), length, 2, machine) == pytest.approx(
            expected, rel=1e-3
        )


class TestServe:
    SMALL = ["--requests", "9", "--max-length", "64", "--slots", "4", "--threads", "1"]

    @pytest.fixture
    def serve(self):
        return load("examples/serve.py")

    @pytest.mark.parametrize(
        "arguments",
        [[], ["--dtype", "int8"], ["--dtype", "bfloat16", "--page-size", "5", "--chunk", "7", "--rows", "8"]],
        ids=" ".join,
    )
    def test_writes_what_one_request_at_a_time_writes(self, serve, capsys, arguments):
        serve.main([*self.SMALL, *arguments])
        printed = capsys.readouterr().out
        assert re.search(r"^9 requests in \d+ steps; requests waited in [1-9]\d* of them$", printed, re.M)
        assert re.search(r"^\d+ tokens read, \d+ written, \d+ tokens/s$", printed, re.M)
        pages, used = map(int, re.search(r"KiB in (\d+) pages, (\d+) used at most", printed).groups())
        assert pages / 3 < used <= pages
        assert printed.splitlines()[-1].startswith("tokens equal")

    def test_the_comparison_can_fail(self, serve, monkeypatch):
        rotate = serve.rotate
        monkeypatch.setattr(serve, "rotate", lambda x, positions: rotate(x, positions) + 1e-6 * torch.rand(1))
        with pytest.raises(SystemExit, match="tokens or their scores differ"):
            serve.main(self.SMALL)
        serve.main([*self.SMALL, "--no-check"])

    def test_pages_go_round(self, serve):
        options = serve.parse([*self.SMALL, "--pages", "4"])
        requests = serve.make_requests(options)
        with torch.inference_mode():
            server = serve.Server(serve.Decoder(), options.slots, options.max_length, options)
            server.serve(requests)
        assert all(request.finished for request in requests)
        assert sum(map(server.pages_of, requests)) > 3 * server.pages
        assert [cache.free_rows() for cache in server.caches] == [4 * options.page_size] * serve.LAYERS
        assert len({tuple(request.written[:3]) for request in requests}) > 5  # it does not write one thing

    def test_a_row_has_the_same_bits_among_any_others(self, serve):
        model = serve.Decoder()
        x, weight = torch.randn(50, serve.DIM), model.head.detach()
        together = serve.linear(x, weight, model.rows)
        alone = torch.cat([serve.linear(row[None], weight, model.rows) for row in x])
        assert torch.equal(together, alone)
        torch.testing.assert_close(together, x @ weight.T)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--pages", "3"], "expected --pages of at least 4, what a request can need, but got 3"),
            (["--page-size", "0"], "expected --page-size of at least 1, but got 0"),
            (["--max-length", "3"], "expected --max-length of at least 4, but got 3"),
        ],
    )
    def test_refuses_what_cannot_be(self, serve, capsys, arguments, message):
        with pytest.raises(SystemExit) as stop:
            serve.main([*self.SMALL, *arguments])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


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
            r"^\| (\S+) +\| (\S+) +\| +[\d.]+ ms \| +[\d.]+ ms \| +1.00 x \| +0% \|$",
            capsys.readouterr().out,
            re.M,
        )
        assert rows == [(name, dtype) for name in small]

    def test_steps_of_both_attentions_agree(self, training_step):
        setting = training_step.Setting(training_step.SETTINGS["swin"].make, (2, 49, 128))
        training_step.check(training_step.make_steps(setting, torch.float32, 0.0), torch.float32, 0.0)


class TestModules:
    @pytest.fixture
    def modules(self):
        return load("benchmarks/modules.py")

    def test_prints_a_row_for_each_shape(self, modules, capsys, monkeypatch):
        monkeypatch.setattr(timing, "perf_counter", itertools.count().__next__)
        monkeypatch.setattr(timing, "cpu_waits", dict)
        shapes = ["1,3,16,2", "2,5,16,4"]
        modules.main(["--shape", *shapes, "--rounds", "2", "--block", "0.001", "--threads", "1"])
        pattern = r"^\| (.+?) +\| (\S+) +\| +[\d.]+ ms \| +[\d.]+ ms \| +1.00 x \| +0% \|$"
        rows = re.findall(pattern, capsys.readouterr().out, re.M)
        assert rows == [(s.replace(",", ", "), dtype) for s in shapes for dtype in modules.DTYPES]


class TestDecodeFromMemory:
    @pytest.fixture
    def decoding(self, monkeypatch):
        module = load("benchmarks/decode_from_memory.py")
        small = cells.Cell("small", cells.Shape(2, 4, 2, 1, 40, 16, 16))
        monkeypatch.setattr(module, "CELLS", {small.name: small})
        monkeypatch.setattr(module, "read_rate", lambda threads, seconds: 5e10)
        return module

    def test_prints_a_row_for_each_cell_and_dtype(self, decoding, capsys, monkeypatch):
        monkeypatch.setattr(timing, "perf_counter", itertools.count().__next__)
        monkeypatch.setattr(timing, "cpu_waits", dict)
        options = ["--threads", "1", "--rounds", "2", "--block", "0.001", "--gigabytes", "1e-5"]
        decoding.main(["--cells", "small", "--dtype", "float32", "float16", *options])
        text = capsys.readouterr().out
        assert "read: 50 GB/s" in text
        pattern = r"^\| small \| (\S+) \| [\d.]+ ms \| [\d.]+ ms \| 1.00 x \| 0.0 \| 0% \|$"
        assert re.findall(pattern, text, re.M) == ["float32", "float16"]

    def test_each_call_has_the_next_of_the_copies(self, decoding, monkeypatch):
        seen = []
        prepare = lambda problem, threads: lambda: seen.append(problem.key.data_ptr())  # noqa: E731
        monkeypatch.setattr(decoding, "available", lambda names: [peers.Contender("attn_ext", prepare)])
        cell = decoding.CELLS["small"]
        calls = decoding.make_calls(cell, torch.float32, 1, 3 * cell.kv_bytes(torch.float32))
        for _ in range(6):
            calls["attn_ext"]()
        assert len(set(seen)) == 3
        assert seen[:3] == seen[3:]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not there")
def test_instruction_counts_reads_the_flags_of_each_set():
    module = load("benchmarks/instruction_counts.py")
    x86 = module.flags_of_sets(module.X86)
    assert list(x86) == ["baseline", "avx2", "avx512", "avx512_bf16"]
    assert all("-mavx2" in x86[name] for name in list(x86)[1:])
    assert "-DATTN_EXT_NEON" in module.flags_of_sets("aarch64")["neon"]


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
        assert len(calls) == len(list(tables.folder.glob("*.md"))) == 3 * 10 + 2 * 3 + 4
        *benches, memory, modules, training, decoding = calls
        batches = [call for call in benches if "--packed" in call or "--paged" in call]
        assert batches == benches[-6:]
        assert memory[0].endswith("memory.py")
        assert modules[0].endswith("modules.py")
        assert training[0].endswith("training_step.py")
        assert decoding[0].endswith("decode_from_memory.py")
        assert all(("--plot" in call) == (call not in batches) for call in benches)
        assert all(call[-2:] == ["--threads", "3"] for call in benches)
        assert "--cells\tdecode*" in "\t".join(benches[7])

    def test_the_commands_are_those_that_bench_takes(self, tables, monkeypatch):
        # A build without the op refuses --paged.
        monkeypatch.setattr(attn_ext, "sdpa_paged", print, raising=False)
        tables()
        parser = argparse.ArgumentParser()
        bench.add_parser(parser.add_subparsers())
        for call in tables.calls()[:-4]:
            arguments = parser.parse_args(call[2:])
            assert bench.choose_problems(arguments)
            batches = bench_batches.chosen(arguments)
            if batches is not None:
                bench_batches.check_options(batches, arguments)

    def test_shows_how_far_it_is(self, tables):
        lines = re.findall(
            r"^\[(#*)(-*)\] (\d+) of 40 parts done, \d+ min; now (\S+)$", tables().stderr, re.M
        )
        assert [int(line[2]) for line in lines] == [*range(41)]
        assert {len(line[0] + line[1]) for line in lines} == {30}
        assert [lines[0][3], lines[-2][3], lines[-1][3]] == [
            "forward-float32",
            "decode-from-memory",
            "nothing",
        ]

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
        assert len(tables.calls()) == 40
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


def test_many_cores_deals_tasks_out():
    command = [
        sys.executable,
        ROOT / "benchmarks/many_cores.py",
        "--cells",
        "tiny",
        "bert-128",
        "--turns",
        "1",
    ]
    command += ["--dtype", "float32", "--threads", "2", "64"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = re.findall(
        r"^\| ([\w-]+ (?:fwd|bwd)) float32 \| [\d.]+ ms \| [\d.]+ ms \|(?: [\d.]+ \|){2}", printed, re.M
    )
    assert rows == ["tiny fwd", "tiny bwd", "bert-128 fwd", "bert-128 bwd"]
    finish = load("benchmarks/many_cores.py").finish
    ends = {seconds: [(seconds, False, -1, 0)] for seconds in (1.0, 2.0, 3.0)}
    assert finish(([(4, 2)], [ends[3.0], ends[1.0], ends[1.0], ends[1.0]]), 2) == 3.0
    assert finish(([(4, 2)], [ends[1.0], ends[1.0], ends[1.0], ends[3.0]]), 2) == 4.0  # the largest last
    assert finish(([(2, 64)], [ends[1.0], ends[2.0]]), 64) == 2.0
    assert finish(([(3, 1), (1, 1)], [ends[1.0], ends[1.0], ends[1.0], ends[3.0]]), 2) == 3.0  # a queue each
    assert finish(([(1, 1), (3, 1)], [ends[1.0], ends[1.0], ends[2.0], ends[1.0]]), 2) == 3.0  # then helps
    first = [(3.0, False, 7, 2), (1.0, False, -1, 0)]  # sets lane 7 to 2 after 3 seconds
    second = [(1.0, True, 7, 1), (2.0, False, -1, 0)]  # waits for that
    assert finish(([(2, 2)], [first, second]), 1) == 7.0
    assert finish(([(2, 2)], [first, second]), 2) == 5.0


class TestCliffs:
    @pytest.fixture(scope="class")
    def cliffs(self):
        return load("benchmarks/cliffs.py")

    def test_counts_what_is_seen(self, cliffs):
        causal = {"is_causal": True, "query_offset": 1}
        seen = cliffs.Call("", batch=2, heads=3, query_length=4, key_length=5, options=causal).pairs()
        assert seen == 6 * (2 + 3 + 4 + 5)
        window = {"window_left": 1, "window_right": 1}
        assert cliffs.Call("", heads=1, query_length=3, key_length=3, options=window).pairs() == 2 + 3 + 2

    def test_finds_a_step_that_work_does_not_explain(self, cliffs):
        calls = [cliffs.Call(f"Lk {n}", key_length=n) for n in (100, 200, 201)]
        overhead = 1e-6
        assert not cliffs.cliffs_of(calls, [1e-3, 2e-3, 2e-3, overhead], 1.3)
        assert list(cliffs.cliffs_of(calls, [1e-3, 2e-3, 3e-3, overhead], 1.3)) == ["Lk 201"]
        assert list(cliffs.cliffs_of(calls, [1e-3, 3e-3, 2e-3, overhead], 1.3)) == ["Lk 200"]
        assert not cliffs.cliffs_of(calls[1:], [1e-3, 1e-3, overhead], 1.3)

    def test_a_step_that_two_shapes_alone_do_not_show_is_none(self, cliffs, monkeypatch):
        overhead, calls = 1e-6, [cliffs.Call(f"Lk {n}", key_length=n) for n in (100, 200)]
        for by_themselves, found in (([2e-3], []), ([4e-3, 2e-3], []), ([4e-3, 4e-3], ["Lk 200"])):
            seconds = iter([1e-3, slower, overhead] for slower in [3e-3, *by_themselves])
            monkeypatch.setattr(cliffs, "least_times", lambda _, turns, s=seconds: iter([next(s)] * turns))
            steps = cliffs.walk(calls, torch.float32, backward=False, turns=2, most=1.3)
            assert list(steps) == found
        assert steps["Lk 200"].steep == pytest.approx(2, rel=0.01)  # as when it was timed again

    def test_no_later_reason_makes_up_for_a_step_that_is_too_steep(self, cliffs):
        for steep, known in ((1.8, True), (2.2, False)):  # of dims beside a vector; of memory 2.5
            reason = cliffs.reason_for("head_dim_one_row", "bwd", "D 65, one row", cliffs.Step("", steep))
            assert (reason is not None) == known

    def test_walks(self):
        command = [sys.executable, ROOT / "benchmarks/cliffs.py", "--walks", "causal", "--turns", "1"]
        command += ["--mode", "fwd", "--dtype", "float32", "--most", "1000"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert printed == "0 cliffs of more than 1000.0 x in 1 walks, 0 of them known\n"

    @pytest.mark.parametrize(
        ("shape", "steep", "known", "fails"),
        [("Lq 9", 1.4, "", 1), ("Lq 33", 1.4, ", most of it empty)", 0), ("Lq 33", 1.9, "", 1)],
        ids=["new", "known", "steeper"],
    )
    def test_says_what_it_found_and_fails(self, cliffs, monkeypatch, capsys, shape, steep, known, fails):
        found = iter([{}, {shape: cliffs.Step(f"{shape} is slow", steep)}])
        monkeypatch.setattr(cliffs, "walk", lambda *of_walk: next(found))
        command = ["cliffs.py", "--walks", "query_length", "--mode", "fwd", "bwd", "--dtype", "float32"]
        monkeypatch.setattr(sys, "argv", command)
        assert cliffs.main() == fails
        line, summary = capsys.readouterr().out.splitlines()
        assert line.startswith(f"query_length bwd float32: {shape} is slow") and line.endswith(
            known or "slow"
        )
        assert summary == f"1 cliffs of more than 1.3 x in 2 walks, {1 - fails} of them known"
