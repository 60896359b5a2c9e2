"""`attn-ext bench`: what it times and checks, how it counts, what it prints and draws, what it refuses."""

import json
import re
import subprocess
import sys
from dataclasses import replace

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


class TestCommand:
    def test_prints_a_table_with_peers_ratio_and_limit(self, capsys):
        assert run("--shape", "1,2,2,16,16,8,8") == 0
        printed = capsys.readouterr().out
        assert re.search(r"^1 threads, \w+; measured in this run: float32 \d+ GF/s, .* GB/s$", printed, re.M)
        assert re.search(r"^cell +attn_ext +F\.sdpa +eager +to the best +of the limit$", printed, re.M)
        assert re.search(r"^1,2,2,16,16,8,8( +[\d.]+ (µs|ms)){3} +[\d.]+ x ", printed, re.M)

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
        assert re.search(r"^\| 1,1,1,8,8,8,8 \|( [\d.]+ (µs|ms) · \d+ \|){3} [\d.]+ x \|", printed, re.M)

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
        assert 0 < result["fraction"] < 1.5

    def test_plot(self, tmp_path):
        pytest.importorskip("matplotlib")
        file = tmp_path / "bars.png"
        assert run("--cells", "tiny", "--dtype", "float32", "bfloat16", "--plot", str(file)) == 0
        assert file.read_bytes().startswith(b"\x89PNG")

    def test_times_itself_without_mask_and_dropout(self, capsys):
        assert (
            run("--shape", "1,2,2,16,16,8,8", "--mask", "bias", "--without", "--mode", "fwd", "dropout") == 0
        )
        assert capsys.readouterr().out.count(" kept\n") == 2

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
        assert len({cell.name for cell in cells.GRID}) == len(cells.GRID)
        assert {cell.mask for cell in cells.GRID} <= set(cells.MASKS)


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
    def test_blocks_alternate(self):
        order = []
        calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
        timing.alternate(calls, timing.Method(block=1e-3, rounds=3))
        switches = [now for before, now in zip(["", *order], order, strict=False) if now != before]
        assert switches == ["a", "b"] * 3

    def test_short_calls_are_timed_several_at_once(self):
        timings = timing.alternate({"short": lambda: None}, timing.Method(block=1e-3, rounds=2))
        assert timings["short"].calls_per_sample > 10
        assert 0 < timings["short"].seconds < 1e-5

    def test_a_slow_contender_has_enough_after_the_limit(self):
        calls = []
        clock = timing.Method(block=1e-3, rounds=50, limit=1e-9)
        timing.alternate({"slow": lambda: calls.append(sum(range(100_000)))}, clock)
        assert len(calls) < 10


class TestReport:
    def result(self, **seconds: float) -> report.Result:
        times = {name.replace("_sdpa", ".sdpa"): time for name, time in seconds.items()}
        return report.Result(
            "cell", SMALL, "none", "float32", "fwd", "aten (aten)", 1e9, 0, times, {}, False, 0.5
        )

    def test_ratio_is_to_the_best_peer(self):
        result = self.result(attn_ext=2e-3, F_sdpa=8e-3, eager=5e-3, without=1e-3)
        assert result.best_peer == "eager"
        assert result.ratio == pytest.approx(2.5)
        assert result.kept == pytest.approx(0.5)

    def test_without_a_peer_there_is_no_ratio(self):
        result = self.result(attn_ext=2e-3)
        assert result.ratio is None
        assert report.as_table([result]).splitlines()[-1].split() == ["cell", "2.00", "ms", "-", "0.50"]

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


def test_peaks_grow_with_the_instruction_set():
    peak = machine.multiply_add_peak
    assert peak("aten", False, 1, 0.05) > peak("baseline", False, 1, 0.05) * 0.5 > 0
