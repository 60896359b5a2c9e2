"""`attn-ext bench --packed` and `--paged`: batches of different lengths, their contenders, the aims."""

import json
import re
import types
from dataclasses import replace

import pytest
import torch

import attn_ext
from attn_ext.benchmark import batch_report, checks, machine, packed, paged, timing
from attn_ext.benchmark.batch_report import AtLeast, AtMost, Report, Result
from attn_ext.cli import main
from attn_ext.commands import bench_batches
from attn_ext.reference import sdpa_packed

SMALL = packed.Batch("small", (3, 1, 5, 3), heads=2, head_dim=8)
SMALL_CACHE = paged.Cache("small", (40, 1, 16), query_heads=4, kv_heads=2, head_dim=8)
DTYPES = [torch.float32, torch.bfloat16]


def paged_by_copies(query, key_pages, value_pages, block_table, seqlens_k, **options):
    """What sdpa_paged means, for a row a sequence: its pages side by side."""
    scales = [options.pop(name, None) for name in ("key_scale", "value_scale")]
    outputs = []
    for row, table, length in zip(query, block_table, seqlens_k.tolist(), strict=True):
        tables = table[: -(-length // key_pages.shape[1])].long()
        assert (tables >= 0).all()
        key, value = (
            pages[tables].flatten(0, 1)[:length].to(query.dtype) * (1 if scale is None else scale)
            for pages, scale in zip((key_pages, value_pages), scales, strict=True)
        )
        tensors = (t.transpose(0, 1).to(query.dtype) for t in (row[None], key, value))
        outputs.append(attn_ext.sdpa(*tensors, **options).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def with_sdpa_paged(monkeypatch):
    monkeypatch.setattr(attn_ext, "sdpa_paged", paged_by_copies, raising=False)


@pytest.fixture
def small_grids(monkeypatch):
    """The command with a batch that is quick, beside the one that shows what a call costs."""
    grids = {"packed": {SMALL: "quick", packed.ONE: "one"}, "paged": {SMALL_CACHE: "quick"}}
    for name, grid in grids.items():
        monkeypatch.setitem(bench_batches.KINDS, name, bench_batches.KINDS[name]._replace(grid=grid))


@pytest.fixture
def ticking(monkeypatch):
    """Every sample takes as long, however busy the machine is that runs the tests."""
    now = iter(range(10**9))
    monkeypatch.setattr(timing, "perf_counter", lambda: next(now) * 2**-13)
    monkeypatch.setattr(timing, "cpu_waits", dict)


def run(*arguments: str) -> int:
    return main(["bench", "--threads", "1", "--rounds", "2", "--block", "0.001", *arguments])


@pytest.mark.usefixtures("small_grids", "ticking")
class TestPackedCommand:
    def test_prints_everyone_and_what_is_aimed_at(self, capsys):
        assert run("--packed") == 0
        printed = capsys.readouterr().out
        assert re.search(r"^1 threads, \w+; measured in this run: float32 \d+ GF/s, .* GB/s$", printed, re.M)
        columns = "cell +packed +alone +loop +padded +F.sdpa padded +F.sdpa jagged +to alone +to padded"
        assert re.search(rf"^{columns} +over alone +of the limit +spread$", printed, re.M)
        # Three distinct lengths of which one counts twice: the sum has four times a sample's time.
        times = r"0.122 ms +0.488 ms +0.122 ms +0.122 ms +0.122 ms +-"
        assert re.search(rf"^small +{times} +4.00 x +1.00 x +- +- +0%$", printed, re.M)
        assert re.search(r"^one-16 .* 1.00 x +1.00 x +0.00 µs +- +0%$", printed, re.M)
        assert "\nto alone: aim at least 0.95 x, reached in small\n" in printed
        assert "\nto padded: aim at least 1.50 x, missed in small\n" in printed
        assert printed.endswith("\nover alone: aim at most 2.00 µs, reached in one-16\n")

    def test_modes_and_dtypes(self, capsys):
        arguments = ["--mode", "fwd", "bwd", "fwdbwd", "--dtype", "float32", "bfloat16"]
        assert run("--packed", "--cells", "small", *arguments) == 0
        printed = capsys.readouterr().out
        for dtype in ("float32", "bfloat16"):
            for mode in ("forward", "backward alone", "forward and backward"):
                assert f"{dtype}, {mode}\n" in printed

    def test_jagged_takes_part_without_causality(self, capsys):
        assert run("--packed", "--cells", "small", "--mask", "none") == 0
        printed = capsys.readouterr()
        assert re.search(r"^small( +[\d.]+ ms){6} ", printed.out, re.M)
        assert "prototype" not in printed.err

    def test_markdown(self, capsys):
        assert run("--packed", "--markdown") == 0
        printed = capsys.readouterr().out
        assert "**float32, forward**\n\n| cell | packed | alone | loop |" in printed
        assert re.search(r"^\| small \|( [\d.]+ ms \|){5} - \| 4.00 x \| ", printed, re.M)
        assert "\n\nto alone: aim" in printed

    def test_json_holds_everything(self, tmp_path):
        file = tmp_path / "numbers.json"
        assert run("--packed", "--json", str(file)) == 0
        numbers = json.loads(file.read_text())
        small, one = numbers["results"]
        assert numbers["attn_ext"] == attn_ext.__version__
        assert numbers["machine"]["threads"] == 1
        assert small["compared"] == {"to alone": 4.0, "to padded": 1.0, "over alone": None}
        assert small["aims"] == {"to alone": 0.95, "to padded": 1.5}
        assert one["aims"] == {"over alone": 2e-6}
        assert set(small["spread"]) == set(small["seconds"]) == {*small["names"]} - {"F.sdpa jagged"}
        assert small["absent"] == {"F.sdpa jagged": "-"}
        assert all(error < 1e-5 for error in small["errors"].values())

    def test_what_does_not_fit_is_not_tried(self, capsys, monkeypatch):
        monkeypatch.setattr(packed, "MOST_BYTES", 1000)
        monkeypatch.setattr(torch.nn.utils.rnn, "pad_sequence", None)
        assert run("--packed", "--cells", "small", "--mask", "none") == 0
        printed = capsys.readouterr().out
        assert len(re.findall("does not fit", printed)) == 3
        assert "to padded" not in printed

    def test_our_own_error_stops_the_run(self, capsys, monkeypatch):
        monkeypatch.setattr(attn_ext, "sdpa_packed", lambda query, *_, **__: torch.zeros_like(query))
        assert run("--packed") == 2
        assert "attn_ext is wrong in small, fwd, torch.float32" in capsys.readouterr().err

    def test_a_peer_that_is_wrong_is_not_timed(self, capsys, monkeypatch):
        monkeypatch.setattr(packed, "_takes_part", lambda p: torch.ones(4, 5, dtype=torch.bool))
        wrong = packed.Contender("F.sdpa padded", packed.Separate(), lambda p: lambda q, k, v: list(v))
        monkeypatch.setattr(packed, "CONTENDERS", (*packed.CONTENDERS[:2], wrong))
        assert run("--packed", "--cells", "small") == 0
        assert re.search(r"^small( +[\d.]+ ms){3} +wrong ", capsys.readouterr().out, re.M)

    def test_an_interrupt_keeps_what_was_timed(self, capsys, monkeypatch):
        time_problem = bench_batches.time_problem

        def interrupted(kind, cell, *rest):
            if cell == "one-16":
                raise KeyboardInterrupt
            return time_problem(kind, cell, *rest)

        monkeypatch.setattr(bench_batches, "time_problem", interrupted)
        assert run("--packed") == 0
        printed = capsys.readouterr()
        assert "interrupted" in printed.err
        assert re.search(r"^small  ", printed.out, re.M)
        assert "one-16" not in printed.out


@pytest.mark.usefixtures("small_grids", "ticking", "with_sdpa_paged")
class TestPagedCommand:
    def test_prints_everyone_and_what_is_aimed_at(self, capsys):
        assert run("--paged", "--dtype", "bfloat16") == 0
        printed = capsys.readouterr().out
        columns = "cell +page 16 +page 1 +page 256 +page 16 by rows +int8 page 16 +alone +packed +F.sdpa"
        ratios = "to alone +to packed +to F.sdpa +int8 +of the limit"
        assert re.search(rf"^{columns} +{ratios} +spread$", printed, re.M)
        times = r"( +0.122 ms){5} +0.366 ms( +0.122 ms){2}"
        assert re.search(rf"^small{times} +3.00 x( +1.00 x){{3}} +- +0%$", printed, re.M)
        assert printed.endswith("\nto alone: aim at least 0.95 x, reached in small\n")

    def test_lists_its_own_grid(self, capsys):
        assert main(["bench", "--paged", "--list"]) == 0
        assert capsys.readouterr().out.splitlines() == ["cell          stands for", "small         quick"]


class TestOptions:
    @pytest.fixture(autouse=True)
    def without_sdpa_paged(self, monkeypatch):
        monkeypatch.delattr(attn_ext, "sdpa_paged", raising=False)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--packed", "--paged"], "--packed, --paged and --model are different things to time"),
            (["--packed", "--model", "gpt2"], "--packed, --paged and --model are different things to time"),
            (
                ["--packed", "--shape", "1,1,1,1,1,1,1"],
                "--shape goes with the grid of cells, not with --packed",
            ),
            (["--packed", "--peers", "eager"], "--peers goes with the grid of cells, not with --packed"),
            (["--packed", "--without"], "--without goes with the grid of cells, not with --packed"),
            (["--packed", "--eager"], "--eager goes with --model alone"),
            (["--packed", "--mode", "weights"], "--packed has the modes fwd, bwd, fwdbwd, got weights"),
            (["--paged", "--mode", "bwd"], "--paged has the modes fwd, got bwd"),
            (["--packed", "--mask", "bias"], "--packed has the masks causal, none, got bias"),
            (
                ["--packed", "--cells", "bert*"],
                "names no batch; there are uniform, long-tiny, powers, one-16",
            ),
            (["--paged"], "--paged needs attn_ext.sdpa_paged, which this build does not have"),
        ],
    )
    def test_refuses_in_one_line(self, capsys, arguments, message):
        assert run(*arguments) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.err.count("\n") == 1
        assert printed.out == ""


class TestPacked:
    @pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd"])
    @pytest.mark.parametrize("is_causal", [True, False])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_all_compute_the_same(self, mode, is_causal, dtype):
        problem = packed.make_problem(SMALL, mode, dtype, is_causal)
        found = packed.errors(problem, packed.entries(problem))
        names = {"packed", "loop", "padded", "F.sdpa padded"}
        assert set(found) == (names if is_causal else {*names, "F.sdpa jagged"})
        assert max(found.values()) < (1e-5 if dtype == torch.float32 else checks.TOLERANCE[dtype])

    def test_what_is_expected_is_what_the_reference_says(self):
        problem = packed.make_problem(SMALL, "fwd", torch.float32)
        expected = sdpa_packed(problem.query, problem.key, problem.value, problem.offsets, is_causal=True)
        entries = packed.entries(problem)
        loop = packed.SINGLE.layout.pack(problem, entries["loop"].call())
        torch.testing.assert_close(loop.double(), expected, atol=1e-5, rtol=1e-5)

    def test_a_wrong_one_is_seen(self):
        problem = packed.make_problem(SMALL, "fwdbwd", torch.float32)
        entries = packed.entries(problem)
        right = entries["packed"].call
        entries["packed"].call = lambda: [*right()[:2], right()[2] * float("nan")]
        assert not packed.errors(problem, entries)["packed"] <= 1

    @pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd"])
    def test_alone_has_each_length_once_and_counts_it_as_often_as_it_is_there(self, mode):
        problem = packed.make_problem(SMALL, mode, torch.float32)
        alone = packed.entries(problem)["alone"]
        assert [count for count, _ in alone.parts] == [2, 1, 1]
        results = [part.call() for _, part in alone.parts]
        assert [result[0].shape[-2] for result in results] == [3, 1, 5]
        loop = packed.entries(problem)["loop"].call()
        assert [torch.equal(result[0], loop[i]) for i, result in enumerate(results)] == [True] * 3

    def test_work_is_that_of_the_sequences(self):
        assert SMALL.flops(is_causal=False) == 4 * 8 * 2 * (9 + 1 + 25 + 9)
        assert SMALL.flops(is_causal=True) == 4 * 8 * 2 * (6 + 1 + 15 + 6)
        problem = packed.make_problem(SMALL, "fwdbwd", torch.float32)
        assert problem.flops == 3.5 * SMALL.flops(is_causal=True)

    def test_gradients_of_padded_batches_count_as_memory(self):
        problem = packed.make_problem(SMALL, "fwd", torch.bfloat16)
        training = replace(problem, mode="fwdbwd")
        assert packed._padded_bytes(problem) == 4 * (4 * 5 * 2 * 8) * 2
        assert packed._padded_bytes(training) == 8 * (4 * 5 * 2 * 8) * 2
        assert packed._f_padded_bytes(problem) - packed._padded_bytes(problem) == 4 * 5 * 5 * 3
        assert packed._f_jagged_bytes(problem) == 2 * (9 + 1 + 25 + 9) * 4 * 3

    @pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
    def test_of_the_grid_only_long_and_tiny_does_not_fit(self, mode):
        """No padded batch of a thousand times 8,192 rows is made."""
        fits = {}
        for batch in packed.GRID:
            problem = packed.Problem(batch, mode, True, *[torch.empty(0)] * 4)
            fits[batch.name] = all(c.needed_bytes(problem) <= packed.MOST_BYTES for c in packed.CONTENDERS)
        assert fits == {"uniform": True, "long-tiny": False, "powers": True, "one-16": True}


@pytest.mark.usefixtures("with_sdpa_paged")
class TestPaged:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_all_compute_the_same(self, dtype):
        problem = paged.make_problem(SMALL_CACHE, dtype)
        found = paged.errors(problem, paged.entries(problem))
        in_pages = {"page 16", "page 1", "page 256", "page 16 by rows", "int8 page 16"}
        assert set(found) == in_pages | {"alone", "packed", "F.sdpa"}
        assert max(found.values()) < (1e-5 if dtype == torch.float32 else checks.TOLERANCE[dtype])

    def test_a_wrong_one_is_seen(self, monkeypatch):
        problem = paged.make_problem(SMALL_CACHE, torch.float32)
        monkeypatch.setattr(attn_ext, "sdpa_paged", lambda query, *_, **__: query.clone())
        assert paged.errors(problem, paged.entries(problem))["page 16"] > 0.5

    @pytest.mark.parametrize("by_rows", [False, True], ids=["by heads", "by rows"])
    @pytest.mark.parametrize("size", [1, 3, 16, 256])
    def test_pages_hold_the_rows_in_no_order(self, size, by_rows):
        lengths = SMALL_CACHE.lengths
        pages = paged.make_pages(lengths, size)
        rows = torch.arange(sum(lengths))[:, None, None].expand(-1, 2, 3)
        pool = pages.lay(rows, by_rows=by_rows)
        assert pool.shape == (sum(-(-n // size) for n in lengths), size, 2, 3)
        assert (pool if by_rows else pool.transpose(1, 2)).is_contiguous()
        used = pages.block_table[pages.block_table >= 0]
        assert sorted(used.tolist()) == list(range(len(pool)))
        assert size > 16 or not torch.equal(used, used.sort().values)
        begin = 0
        for table, length in zip(pages.block_table, lengths, strict=True):
            own = pool[table[table >= 0].long()].flatten(0, 1)[:length]
            assert torch.equal(own, rows[begin : begin + length])
            begin += length

    def test_int8_takes_all_of_its_range_and_is_off_by_half_a_step_at_most(self):
        rows = torch.randn(50, 2, 8)
        numbers, scale = paged.quantized(rows)
        assert numbers.dtype == torch.int8
        assert numbers.abs().max() == 127
        assert (numbers * scale - rows).abs().max() <= 0.501 * scale

    def test_bytes_are_those_of_keys_and_values(self):
        problem = paged.make_problem(SMALL_CACHE, torch.bfloat16)
        assert problem.bytes_read == 2 * (40 + 1 + 16) * 2 * 8 * 2


class TestReport:
    AT_LEAST = AtLeast("to other", "other", "ours", 1.5, lambda cell, dtype: cell == "cell")
    AT_MOST = AtMost("over other", "other", "ours", 2e-6)

    def result(self, ours: float | None, other: float | None, **more) -> Result:
        times = {"ours": ours, "other": other}
        seconds = {name: time for name, time in times.items() if time is not None}
        absent = {name: "stalled" for name, time in times.items() if time is None}
        spread = more.pop("spread", dict.fromkeys(seconds, 0.0))
        return Result(
            "cell", "float32", "fwd", ("ours", "other"), 1.0, 0, seconds, spread, {}, absent, **more
        )

    def test_an_aim_is_reached_or_missed(self):
        slow = replace(self.result(1e-3, 1.4e-3), cell="cell")
        line = "to other: aim at least 1.50 x, "
        assert Report([self.AT_LEAST], [slow]).as_table().endswith(f"\n{line}missed in cell")
        assert (
            Report([self.AT_LEAST], [self.result(1e-3, 1.5e-3)]).as_table().endswith(f"{line}reached in cell")
        )

    def test_cells_without_the_aim_are_shown_but_not_judged(self):
        other = replace(self.result(1e-3, 1.4e-3), cell="another")
        table = Report([self.AT_LEAST], [other]).as_table()
        assert "1.40 x" in table
        assert "aim" not in table

    def test_what_a_call_costs_is_a_difference(self):
        table = Report([self.AT_MOST], [self.result(13.5e-6, 4e-6)]).as_table()
        assert re.search(r"^cell +13.5 µs +4.00 µs +9.50 µs ", table, re.M)
        assert table.endswith("over other: aim at most 2.00 µs, missed in cell")

    def test_what_stalled_has_no_ratio_and_no_aim(self):
        table = Report([self.AT_LEAST], [self.result(1e-3, None)]).as_table()
        assert re.search(r"^cell +1.00 ms +stalled +- +0%$", table, re.M)
        assert "aim" not in table

    def test_a_rough_ratio_is_marked(self):
        rough = self.result(1e-3, 2e-3, spread={"ours": 0.0, "other": 0.2})
        assert "~2.00 x" in Report([self.AT_LEAST], [rough]).as_table()
        assert rough.unsteady == {"other": 0.2}

    def test_the_limit_is_shown_where_the_silicon_bounds_the_call(self):
        bound = self.result(1e-3, 2e-3, fraction=0.5, memory_bound=True)
        assert " 0.50 mem " in Report([], [bound]).as_table()
        assert " 0.50" not in Report([], [self.result(10e-6, 2e-3, fraction=0.5)]).as_table()

    def test_is_made_of_the_blocks(self):
        problem = types.SimpleNamespace(mode="fwd", dtype=torch.float32, flops=5e8, bytes_read=10)
        entries = {
            "ours": timing.Timing(print, [timing.Block([second]) for second in (1.0, 1.1, 1.2)]),
            "other": timing.Timing(print, [timing.Block([1.0], waiting=0.9)]),
            "third": batch_report.DOES_NOT_FIT,
        }
        limits = machine.Machine(1, "avx2", 1e9, 1e9, 1e9)
        result = batch_report.make_result("cell", problem, "ours", entries, {}, limits)
        assert result.seconds == {"ours": 1.1}
        assert result.absent == {"other": "stalled", "third": "does not fit"}
        assert result.stalled == ("other",)
        assert result.fraction == pytest.approx(0.5 / 1.1)
        assert result.spread == {"ours": pytest.approx(0.1 / 1.1)}
