"""`attn-ext bench`: what it times and checks, how it counts, what it prints and draws, what it refuses."""

import json
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attn_ext
from attn_ext.benchmark import cells, chart, checks, machine, peers, report, timing
from attn_ext.benchmark.cells import Cell, Shape
from attn_ext.cli import main
from attn_ext.commands import bench

QUICK = ["--threads", "1", "--rounds", "2", "--block", "0.01", "--peers", "F.sdpa", "eager"]
SMALL = Shape(2, 4, 2, 5, 7, 8, 12)


def run(*arguments: str) -> int:
    return main(["bench", *QUICK, *arguments])


class Clock:
    """In place of the machine's clock: moves as calls say that they take time, and `tick` whenever it is
    read. `waited` is how long one of two threads has stood in line for a processor."""

    def __init__(self, monkeypatch, tick: float = 0.0) -> None:
        self.now, self.tick, self.waited = 0.0, tick, 0.0
        monkeypatch.setattr(timing, "perf_counter", self.read)
        monkeypatch.setattr(timing, "cpu_waits", lambda: {"1": 0.0, "2": self.waited})

    def read(self) -> float:
        self.now += self.tick
        return self.now

    def taking(self, *seconds: float):
        """A call that takes so long; with several, the next from call to call, and the last from then on."""
        left = list(seconds)

        def call() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call

    def waiting(self, seconds: float, waited: float):
        """A call in which a thread waits for a processor."""

        def call() -> None:
            self.now += seconds
            self.waited += waited

        return call


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


class TestCommand:
    @pytest.fixture(autouse=True)
    def ticking(self, monkeypatch) -> Clock:
        """Every sample takes as long, however busy the machine is that runs the tests."""
        return Clock(monkeypatch, tick=2**-13)

    def test_prints_a_table_with_peers_ratio_and_limit(self, capsys):
        assert run("--shape", "1,2,2,16,16,8,8") == 0
        printed = capsys.readouterr().out
        assert re.search(r"^1 threads, \w+; measured in this run: float32 \d+ GF/s, .* GB/s$", printed, re.M)
        assert re.search(
            r"^cell +attn_ext +F\.sdpa +eager +to the best +of the limit +spread$", printed, re.M
        )
        assert re.search(r"^1,2,2,16,16,8,8( +[\d.]+ (µs|ms)){3} +[\d.]+ x +\S+ +\d+%$", printed, re.M)

    def test_takes_cells_of_the_grid_by_wildcard(self, capsys):
        assert run("--cells", "tiny*") == 0
        assert re.findall(r"^(\S+)  .* x ", capsys.readouterr().out, re.M) == ["tiny", "tiny-square"]

    @pytest.mark.parametrize("mode", cells.MODES)
    def test_modes_and_dtypes(self, capsys, mode):
        assert run("--shape", "2,4,2,8,8,8,8", "--mode", mode, "--dtype", "float32", "bfloat16") == 0
        printed = capsys.readouterr().out
        for dtype in ("float32", "bfloat16"):
            assert f"{dtype}, {report.MODE_NAMES[mode]}\n" in printed

    def test_markdown(self, capsys):
        assert run("--shape", "1,1,1,8,8,8,8", "--markdown") == 0
        printed = capsys.readouterr().out
        assert re.search(
            r"^\| 1,1,1,8,8,8,8 \|( [\d.]+ (µs|ms) · \d+ \|){3} [\d.]+ x \| \S+ \| \d+% \|", printed, re.M
        )

    def test_json_holds_everything(self, tmp_path):
        file = tmp_path / "numbers.json"
        assert run("--shape", "1,2,1,16,32,8,8", "--mask", "causal", "--json", str(file)) == 0
        numbers = json.loads(file.read_text())
        (result,) = numbers["results"]
        assert numbers["attn_ext"] == attn_ext.__version__
        assert numbers["machine"]["threads"] == 1
        assert numbers["machine"]["float32_peak"] > 1e8
        assert numbers["machine"]["read_rate"] > 1e8
        assert result["shape"] == [1, 2, 1, 16, 32, 8, 8]
        assert set(result["seconds"]) == {"attn_ext", "F.sdpa", "eager"}
        assert all(seconds > 0 for seconds in result["seconds"].values())
        assert all(error < 1e-5 for error in result["errors"].values())
        assert result["best_peer"] in ("F.sdpa", "eager")
        assert result["fraction"] > 0
        assert set(result["spread"]) == set(result["seconds"])
        assert result["stalled"] == []
        assert numbers["not_installed"] == []

    def test_plot(self, tmp_path):
        pytest.importorskip("matplotlib")
        file = tmp_path / "bars.png"
        assert run("--cells", "tiny", "--dtype", "float32", "bfloat16", "--plot", str(file)) == 0
        assert file.read_bytes().startswith(b"\x89PNG")

    def test_times_itself_without_mask_and_dropout(self, capsys):
        assert (
            run("--shape", "1,2,2,16,16,8,8", "--mask", "bias", "--without", "--mode", "fwd", "dropout") == 0
        )
        assert len(re.findall(r" kept +spread\n", capsys.readouterr().out)) == 2

    def test_threads_are_put_back(self):
        before = torch.get_num_threads()
        assert run("--cells", "tiny", "--threads", str(before + 1)) == 0
        assert torch.get_num_threads() == before

    def test_capability_is_that_of_a_fresh_process(self):
        name = attn_ext.available_cpu_capabilities()[0]
        command = [sys.executable, "-m", "attn_ext", "bench", *QUICK, "--cells", "tiny", "--capability", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"1 threads, {name}; ")

    def test_lists_the_grid(self, capsys):
        assert main(["bench", "--list"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == len(cells.GRID) + 1
        assert main(["bench", "--list", "--outside"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1:]] == [cell.name for cell in cells.OUTSIDE]

    def test_names_are_of_the_list_that_is_asked_for(self, capsys):
        assert run("--outside", "--cells", "tiniest-heads") == 0
        assert "tiniest-heads" in capsys.readouterr().out
        assert run("--cells", "tiniest-heads") == 2
        assert "names no cell of the grid" in capsys.readouterr().err
        assert run("--outside", "--cells", "bert-128") == 2
        assert "names no cell outside of the grid; there are vit-257, " in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--cells", "bert-1000"], "names no cell of the grid; there are bert-128, "),
            (["--shape", "1,2,3"], "expected seven sizes of 1 or more, B,Hq,Hkv,Lq,Lk,D,Dv, got '1,2,3'"),
            (["--shape", "1,3,2,4,4,4,4"], "expected Hq to be a multiple of Hkv, got 3 and 2"),
            (["--mask", "diagonal"], "invalid choice: 'diagonal'"),
            (["--rounds", "0"], "expected a number of 1 or more, got '0'"),
            (["--block", "nan"], "expected a number of seconds above 0, got 'nan'"),
            (["--capability", "avx1024"], "--capability must be one of "),
            (["--json", "no/such/folder.json"], "there is no folder no/such"),
            (["--plot", "bars.txt"], "cannot write bars.txt as a picture"),
        ],
    )
    def test_refuses_in_one_line(self, capsys, arguments, message):
        if "--plot" in arguments:
            pytest.importorskip("matplotlib")
        try:
            code = run(*arguments)
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        assert code == 2
        assert message in printed.err
        assert printed.err.count("\n") == 1
        assert printed.out == ""

    def test_our_own_error_stops_the_run(self, capsys, monkeypatch):
        monkeypatch.setattr(checks, "errors", lambda *_: {"attn_ext": float("nan")})
        assert run("--cells", "tiny") == 2
        assert "attn_ext is wrong in tiny, fwd, torch.float32" in capsys.readouterr().err

    def test_a_peer_that_is_wrong_is_not_timed(self, capsys, monkeypatch):
        monkeypatch.setattr(checks, "errors", lambda *_: {"attn_ext": 0.0, "eager": 0.5, "F.sdpa": 0.0})
        assert run("--cells", "tiny") == 0
        assert re.search(r"^tiny .* wrong ", capsys.readouterr().out, re.M)

    def test_an_interrupt_keeps_what_was_timed(self, capsys, monkeypatch):
        time_problem = bench.time_problem

        def interrupted(problem, *rest):
            if problem.cell.name == "tiny-square":
                raise KeyboardInterrupt
            return time_problem(problem, *rest)

        monkeypatch.setattr(bench, "time_problem", interrupted)
        assert run("--cells", "tiny", "tiny-square") == 0
        printed = capsys.readouterr()
        assert "interrupted" in printed.err
        assert re.search(r"^tiny  ", printed.out, re.M)

    def test_what_a_busy_machine_spoils_has_no_ratio(self, capsys, ticking, tmp_path):
        """A thread waits for most of each tick: the blocks agree with each other all the same."""
        read = ticking.read

        def starved() -> float:
            ticking.waited += 0.9 * ticking.tick
            return read()

        timing.perf_counter = starved  # put back with the fixture's
        file = tmp_path / "numbers.json"
        assert run("--cells", "tiny*", "--json", str(file)) == 0
        printed = capsys.readouterr()
        assert re.search(r"^tiny( +stalled){3} +- +- +-$", printed.out, re.M)
        assert "geometric mean" not in printed.out
        assert " x" not in printed.out
        assert printed.err.count("warning: ") == 1
        assert "stalled, not measured" in printed.err
        assert "  tiny, float32, forward: attn_ext, F.sdpa, eager\n" in printed.err
        result = json.loads(file.read_text())["results"][0]
        assert (result["seconds"], result["ratio"], result["fraction"]) == ({}, None, None)

    def test_a_quiet_machine_is_not_warned_about(self, capsys):
        assert run("--cells", "tiny*") == 0
        printed = capsys.readouterr()
        assert "warning" not in printed.err
        assert printed.out.endswith("geometric mean 1.00 x the best peer, ahead of it everywhere\n")

    @pytest.mark.parametrize("named", [True, False])
    def test_says_who_is_not_installed_and_how_to_have_them(self, capsys, monkeypatch, tmp_path, named):
        absent = ("onnxruntime", "onnx", "openvino")
        monkeypatch.setattr(peers, "find_spec", lambda name: None if name in absent else name)
        chosen = ["--peers", "F.sdpa", "onnxruntime", "openvino"] if named else []
        file = tmp_path / "numbers.json"
        few = ["--threads", "1", "--rounds", "2", "--block", "0.01", "--cells", "tiny", "--json", str(file)]
        assert main(["bench", *few, *chosen]) == 0
        said = "not installed, so left out: onnxruntime, openvino; to have them: pip install "
        printed = capsys.readouterr()
        assert printed.err == f"{said}onnxruntime onnx openvino\n"  # before minutes of measuring
        assert f"\n{said}onnxruntime onnx openvino\n\n" in printed.out  # and with the table
        assert json.loads(file.read_text())["not_installed"] == ["onnxruntime", "openvino"]

    def test_says_nothing_of_peers_that_are_not_wanted(self, capsys, monkeypatch):
        monkeypatch.setattr(peers, "find_spec", lambda name: None)
        assert run("--cells", "tiny") == 0
        assert "not installed" not in "".join(capsys.readouterr())


class TestWork:
    """2 (D + Dv) for every pair that causality and window let through."""

    @pytest.mark.parametrize(
        ("mask", "lengths", "pairs"),
        [
            ("none", (3, 5), 15),
            ("padding", (3, 5), 15),
            ("bias", (3, 5), 15),
            ("causal", (4, 4), 10),
            ("causal", (2, 5), 4 + 5),
            ("window", (16, 16), 1 + 2 + 14 * 3),
        ],
    )
    def test_flops(self, mask, lengths, pairs):
        assert Cell("", Shape(2, 4, 2, *lengths, 8, 12), mask).flops() == 2 * (8 + 12) * pairs * 2 * 4

    def test_bytes_are_those_of_keys_and_values(self):
        assert Cell("", SMALL).kv_bytes(torch.bfloat16) == 2 * 2 * 7 * (8 + 12) * 2

    def test_the_slower_of_computing_and_reading_is_the_limit(self):
        limits = machine.Machine(2, "avx2", float32_peak=100.0, bfloat16_peak=200.0, read_rate=10.0)
        assert limits.shortest(1000, 50, torch.float32) == 10.0
        assert limits.shortest(1000, 50, torch.bfloat16) == 5.0
        assert limits.shortest(1000, 200, torch.float32) == 20.0
        assert limits.memory_bound(1000, 200, torch.float32)

    def test_the_grid_has_the_masks_and_names_once(self):
        every = [*cells.GRID, *cells.OUTSIDE]
        assert len({cell.name for cell in every}) == len(every)
        assert {cell.mask for cell in every} <= set(cells.MASKS)


class TestPeers:
    """Everybody computes the same, whatever the mask."""

    @pytest.mark.parametrize("mask", cells.MASKS)
    @pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd", "weights"])
    @pytest.mark.parametrize("lengths", [(5, 7), (9, 9)])
    def test_are_right(self, mask, mode, lengths):
        problem = cells.make_problem(Cell("", Shape(2, 4, 2, *lengths, 8, 12), mask), mode, torch.float32)
        found = checks.errors(problem, peers.available(), 1)
        assert set(found) >= {"attn_ext", "eager"}
        assert max(found.values()) < 1e-5

    @pytest.mark.parametrize("mask", cells.MASKS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_are_right_without_groups(self, mask, dtype):
        problem = cells.make_problem(Cell("", Shape(2, 2, 2, 9, 33, 8, 12), mask), "fwd", dtype)
        found = checks.errors(problem, peers.available(), 1)
        assert max(found.values()) < checks.TOLERANCE[dtype]

    def test_dropout_keeps_the_mean(self):
        problem = cells.make_problem(Cell("", Shape(2, 2, 2, 64, 128, 8, 8)), "dropout", torch.float32)
        assert max(checks.errors(problem, peers.available(), 1).values()) < 1e-4

    @pytest.mark.parametrize("mode", ["fwd", "bwd"])
    def test_a_part_of_a_large_problem_is_checked(self, monkeypatch, mode):
        monkeypatch.setattr(checks, "PAIRS", 100)
        problem = cells.make_problem(Cell("", Shape(2, 4, 2, 50, 10, 8, 8), "bias"), mode, torch.float32)
        assert max(checks.errors(problem, peers.available(), 1).values()) < 1e-5

    def test_a_wrong_contender_is_seen(self):
        problem = cells.make_problem(Cell("", SMALL, "causal"), "fwd", torch.float32)
        lazy = replace(peers.CONTENDERS[0], prepare=lambda p, _: lambda: torch.zeros(2, 4, 5, 12))
        assert checks.errors(problem, [lazy], 1)["attn_ext"] > 0.5


class TestTiming:
    """By a clock that moves as the calls say."""

    METHOD = timing.Method(block=0.01, rounds=5)

    def measure(self, call, method: timing.Method = METHOD) -> timing.Timing:
        return timing.alternate({"": call}, method)[""]

    def test_blocks_alternate(self, clock):
        order = []
        take = clock.taking(1e-3)
        calls = {name: lambda name=name: (order.append(name), take()) for name in ("a", "b")}
        timing.alternate(calls, timing.Method(block=0.01, rounds=3))
        switches = [now for before, now in zip(["", *order], order, strict=False) if now != before]
        assert switches == ["a", "b"] * 3

    def test_short_calls_are_timed_several_at_once(self, clock):
        found = self.measure(clock.taking(1e-7))
        assert found.calls_per_sample == 500
        assert found.seconds == pytest.approx(1e-7)

    def test_a_sum_counts_each_part_as_often_as_it_counts(self, clock):
        parts = [(3, timing.Timing(clock.taking(1e-6))), (1, timing.Timing(clock.taking(5e-3)))]
        found = timing.alternate({"": timing.SumTiming(clock.taking(1.0), parts=parts)}, self.METHOD)[""]
        assert found.seconds == pytest.approx(5.003e-3)
        assert [part.calls_per_sample for _, part in parts] == [50, 1]

    def test_a_slow_contender_has_enough_after_the_limit(self, clock):
        found = self.measure(clock.taking(1.0), timing.Method(block=0.3, rounds=50, limit=2.5))
        assert [len(block.samples) for block in found.blocks] == [1, 1, 1]

    def test_a_block_has_calls_enough_for_a_median(self, clock):
        found = self.measure(clock.taking(0.2), timing.Method(block=0.3, rounds=2))
        assert [len(block.samples) for block in found.blocks] == [3, 3]

    def test_one_call_that_hangs_does_not_count(self, clock):
        hangs = [1e-3] * 5 + [0.5] + [1e-3]
        assert self.measure(clock.taking(*hangs)).seconds == pytest.approx(1e-3)

    def test_blocks_that_stalled_are_measured_again(self, clock):
        stalled = [4e-3] * 6  # the first two blocks and their warm-up
        found = self.measure(clock.taking(*stalled, 1e-3))
        assert len(found.blocks) > 5
        assert len(found.steady) == 5
        assert found.seconds == pytest.approx(1e-3)
        assert found.spread == pytest.approx(0.0)

    def test_blocks_while_a_thread_waits_for_a_processor_are_no_measure(self, clock):
        """The trap: they agree to the last digit."""
        found = self.measure(clock.waiting(24e-3, 16e-3))
        assert [block.seconds for block in found.blocks] == pytest.approx([24e-3] * 10)
        assert found.seconds is None
        assert found.spread is None

    def test_a_short_wait_does_no_harm(self, clock):
        assert self.measure(clock.waiting(1e-3, 0.1e-3)).seconds == pytest.approx(1e-3)

    def test_one_of_many_contenders_stalls_alone(self, clock):
        calls = {"ours": clock.taking(1e-3), "theirs": clock.waiting(24e-3, 16e-3)}
        turns = []
        found = timing.alternate(calls, self.METHOD, lambda name, turn: turns.append((name, turn)))
        assert found["ours"].seconds == pytest.approx(1e-3)
        assert found["theirs"].seconds is None
        assert [name for name, turn in turns if turn >= 5] == ["theirs"] * 5

    def test_spread_is_between_the_quartiles_of_the_blocks(self):
        def spread(*seconds: float) -> float | None:
            return timing.Timing(print, [timing.Block([s]) for s in seconds]).spread

        assert spread(1.0, 1.0, 1.9, 1.0, 1.0) == 0.0  # one may be anywhere
        assert spread(1.0, 1.1, 1.2, 1.3, 1.4) == pytest.approx(0.2 / 1.2)
        assert spread(1.0) is None

    @pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count")
    def test_waits_of_threads_are_those_that_the_kernel_counts(self):
        first, second = timing.cpu_waits(), timing.cpu_waits()
        own = str(threading.get_native_id())
        assert 0.0 <= first[own] <= second[own]


class TestReport:
    def result(self, **seconds: float) -> report.Result:
        times = {name.replace("_sdpa", ".sdpa"): time for name, time in seconds.items()}
        return report.Result(
            "cell", SMALL, "none", "float32", "fwd", "aten (aten)", 1e9, 0, times, {}, False, 0.5
        )

    def busy(self, spread=None, stalled=(), **seconds: float) -> report.Result:
        return replace(self.result(**seconds), spread=spread or {}, stalled=stalled)

    def test_ratio_is_to_the_best_peer(self):
        result = self.result(attn_ext=2e-3, F_sdpa=8e-3, eager=5e-3, without=1e-3)
        assert result.best_peer == "eager"
        assert result.ratio == pytest.approx(2.5)
        assert result.kept == pytest.approx(0.5)

    def test_without_a_peer_there_is_no_ratio(self):
        result = self.result(attn_ext=2e-3)
        assert result.ratio is None
        assert report.as_table([result]).splitlines()[-1].split() == ["cell", "2.00", "ms", "-", "0.50", "-"]

    def test_no_ratio_where_any_peer_stalled(self):
        """It might have been the best."""
        result = self.busy(attn_ext=2e-6, eager=5e-6, stalled=("F.sdpa",))
        assert result.ratio is None
        row = report.as_table([result]).splitlines()[-1]
        assert row.split()[:5] == ["cell", "2.00", "µs", "stalled", "5.00"]
        assert " x" not in row

    def test_no_ratio_where_ours_stalled(self):
        result = replace(self.busy(eager=5e-6, without=1e-6, stalled=("attn_ext",)), fraction=None)
        assert (result.ratio, result.kept, result.bounded) == (None, None, False)
        assert report.as_table([result]).splitlines()[-1].split()[:2] == ["cell", "stalled"]

    def test_a_ratio_of_two(self):
        steady = timing.Timing(print, [timing.Block([1e-3]), timing.Block([1.2e-3])])
        stalled = timing.Timing(print, [timing.Block([1e-3], waiting=0.5)])
        assert report.as_ratio_row({"ours": steady, "theirs": stalled}) == ["1.10 ms", "stalled", "-", "9%"]
        assert report.as_ratio_row({"ours": stalled, "theirs": stalled}) == ["stalled", "stalled", "-", "-"]

    def test_our_own_call_without_mask_may_stall(self):
        result = self.busy(attn_ext=2e-6, eager=4e-6, stalled=("without",))
        assert result.ratio == pytest.approx(2.0)
        assert result.kept is None

    def test_a_ratio_of_unsteady_blocks_is_marked(self):
        spread = {"attn_ext": 0.02, "F.sdpa": 0.5, "eager": 0.11}
        result = self.busy(attn_ext=1e-3, F_sdpa=9e-3, eager=2e-3, spread=spread)
        assert report.as_table([result]).splitlines()[-1].split()[-4:] == ["~2.00", "x", "0.50", "50%"]
        far = {"attn_ext": 0.02, "F.sdpa": 0.5, "eager": 0.09}
        assert not replace(result, spread=far).rough  # of one that is not in the ratio

    def test_the_mean_says_what_it_lacks(self):
        good = self.busy(attn_ext=1e-3, eager=2e-3)
        rough = replace(good, cell="rough", spread={"eager": 0.2})
        stalled = replace(self.busy(attn_ext=1e-3, stalled=("eager",)), cell="stalled")
        table = report.as_table([good, rough, stalled, good])
        mean = "geometric mean 2.00 x the best peer; rough in rough; not measured in stalled"
        assert table.splitlines()[-1] == mean

    def test_one_warning_names_all_that_is_no_good(self):
        good = self.busy(attn_ext=1e-3, eager=2e-3, spread={"attn_ext": 0.1, "eager": 0.0})
        assert report.warning([good]) is None
        rough = replace(good, spread={"attn_ext": 0.0, "eager": 0.2})
        stalled = self.busy(attn_ext=1e-3, stalled=("F.sdpa", "eager"))
        text = report.warning([good, rough, stalled, rough])
        assert text.count("warning") == 1
        assert text.count("cell, float32, forward: eager 20%") == 2
        assert "cell, float32, forward: F.sdpa, eager" in text

    def test_is_made_of_the_blocks(self):
        problem = cells.make_problem(Cell("", SMALL), "fwd", torch.float32)
        blocks = [timing.Block([second]) for second in (1.0, 1.1, 1.2)]
        waiting = [timing.Block([1.0], waiting=0.9)]
        timings = {"attn_ext": timing.Timing(print, blocks), "eager": timing.Timing(print, waiting)}
        result = report.make_result(problem, timings, {}, machine.Machine(1, "avx2", 1e9, 1e9, 1e9))
        assert result.seconds == {"attn_ext": 1.1}
        assert result.spread == {"attn_ext": pytest.approx(0.1 / 1.1)}
        assert result.stalled == ("eager",)

    def test_says_where_it_is_behind(self):
        fast, slow = self.result(attn_ext=1e-3, eager=2e-3), self.result(attn_ext=2e-3, eager=1e-3)
        summary = report.as_table([fast, replace(slow, cell="other")]).splitlines()[-1]
        assert summary == "geometric mean 1.00 x the best peer; behind it in other"

    def test_times_have_three_digits_and_a_unit_that_fits(self):
        printed = report.as_table([self.result(attn_ext=8.8e-6, eager=0.1234, F_sdpa=0.99951e-4)])
        assert "8.80 µs" in printed
        assert "123 ms" in printed
        assert "100.0 µs" not in printed

    def test_bars_are_shares_of_the_limit(self):
        pytest.importorskip("matplotlib")
        limits = machine.Machine(2, "avx2", 1e11, 2e11, 1e10)
        figure = chart.draw_bars([self.result(attn_ext=1e-3, eager=2e-3)], limits)
        ours, theirs = figure.axes[0].containers
        assert [ours[0].get_width(), theirs[0].get_width()] == [0.5, 0.25]
        assert figure.axes[0].texts[0].get_text() == "2.0 x"

    def test_bars_leave_out_what_stalled(self):
        pytest.importorskip("matplotlib")
        limits = machine.Machine(2, "avx2", 1e11, 2e11, 1e10)
        stalled = replace(self.busy(eager=2e-3, stalled=("attn_ext",)), fraction=None)
        figure = chart.draw_bars([stalled], limits)
        ours, theirs = figure.axes[0].containers
        assert [ours[0].get_width(), theirs[0].get_width()] == [0.0, 1.0]
        assert not figure.axes[0].texts


def test_peaks_grow_with_the_instruction_set():
    peak = machine.multiply_add_peak
    assert peak("aten", False, 1, 0.05) > peak("baseline", False, 1, 0.05) * 0.5 > 0
