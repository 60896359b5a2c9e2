"""`attn-ext doctor`: what it makes of facts, how it reads them, and what it prints and returns."""

import os
import re
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch

import attn_ext
from attn_ext.cli import main
from attn_ext.commands import doctor
from attn_ext.commands.doctor import FINE, MEND, NOTE
from attn_ext.commands.doctor_facts import (
    Facts,
    bound_early,
    chosen,
    collect,
    cpu_flags,
    cpu_quota,
    folders_of,
    openmp_runtimes,
)

AVX2 = frozenset({"fpu", "avx2", "fma", "f16c", "popcnt"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
WELL = Facts(
    openmp=("/lib/libgomp.so.1",),
    threads=8,
    cores=8,
    affinity=8,
    quota=None,
    cpu_flags=AVX512,
    capability="avx512",
    available=("baseline", "avx2", "avx512"),
    forced=None,
    huge_pages="madvise",
    torch_built="2.13.0",
    torch_running="2.13.1+cpu",
    torch_folders=("/site/torch",),
    attn_ext_folders=("/site/attn_ext",),
    integrations=(("transformers", "5.23.0", ("5.20", "5.23")),),
    bound_early=(),
)


def finding(about: str, **changes) -> doctor.Finding:
    (found,) = (f for f in doctor.examine(replace(WELL, **changes)) if f.about == about)
    return found


class TestExamine:
    def test_a_good_environment_has_nothing_to_mend(self):
        findings = doctor.examine(WELL)
        assert {f.status for f in findings} == {FINE}
        assert len(findings) == len(doctor.CHECKS)
        assert doctor.report(findings).endswith("\nnothing to mend")

    @pytest.mark.parametrize(
        ("about", "changes", "status", "found", "advice"),
        [
            (
                "OpenMP",
                {"openmp": ("/a/libgomp.so.1", "/b/libiomp5.so")},
                MEND,
                "2 runtimes.*/b/libiomp5",
                "OMP_NUM",
            ),
            ("OpenMP", {"openmp": ()}, NOTE, "no runtime", ""),
            ("threads", {"threads": 16}, MEND, "16 threads; 8 of 8", "OMP_NUM_THREADS=8"),
            ("threads", {"affinity": 3}, MEND, "8 threads; 3 of 8", "OMP_NUM_THREADS=3"),
            ("threads", {"quota": 1.5}, MEND, "limit is 1.5", "OMP_NUM_THREADS=2"),
            ("threads", {"quota": 0.2}, MEND, "limit is 0.2", "OMP_NUM_THREADS=1"),
            ("threads", {"quota": 9.0}, FINE, "limit is 9", ""),
            ("threads", {"threads": 4}, FINE, "4 threads", ""),
            ("affinity", {"affinity": 2}, NOTE, "bound to 2 of 8", "taskset"),
            (
                "instruction set",
                {"capability": "avx2", "forced": "avx2"},
                MEND,
                "=avx2; avx512 is there",
                "unset",
            ),
            (
                "instruction set",
                {"available": ("baseline", "avx2"), "capability": "avx2"},
                MEND,
                "has avx512, the build avx2",
                "build attn_ext again",
            ),
            (
                "instruction set",
                {
                    "available": ("baseline", "amx", "avx512_bf16"),
                    "capability": "avx512_bf16",
                    "cpu_flags": AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
                },
                NOTE,
                "has AMX, which this process may not use",
                "ATTN_EXT_MATRIX_UNIT",
            ),
            (
                "instruction set",
                {"available": ("baseline",), "capability": "baseline", "cpu_flags": frozenset({"sse2"})},
                NOTE,
                "no AVX2",
                "AVX2",
            ),
            (
                "instruction set",
                {"available": ("baseline",), "capability": "baseline", "cpu_flags": None},
                FINE,
                "baseline",
                "",
            ),
            ("huge pages", {"huge_pages": "never"}, MEND, "off", "echo madvise"),
            ("huge pages", {"huge_pages": "always"}, FINE, "always", ""),
            ("huge pages", {"huge_pages": None}, NOTE, "does not say", ""),
            (
                "torch",
                {"torch_running": "2.12.0"},
                MEND,
                "against 2.13.0, running under 2.12.0",
                r"torch==2.13.\*",
            ),
            (
                "path",
                {"attn_ext_folders": ("/a", "/b")},
                MEND,
                "2 of attn_ext.*/a, /b",
                "pip uninstall attn_ext",
            ),
            ("path", {"torch_folders": ("/a", "/b")}, MEND, "2 of torch", "pip uninstall torch"),
            (
                "transformers",
                {"integrations": (("transformers", "5.24.0", ("5.20", "5.23")),)},
                MEND,
                "5.24.0",
                "5.23",
            ),
            (
                "transformers",
                {"integrations": (("transformers", "5.3.9", ("5.20", "5.23")),)},
                MEND,
                "5.3.9",
                "5.23",
            ),
            (
                "transformers",
                {"integrations": (("transformers", "5.23.4rc1", ("5.20", "5.23")),)},
                FINE,
                "5.23",
                "",
            ),
            (
                "override_sdpa",
                {"bound_early": ("timm.layers",)},
                NOTE,
                "does not reach timm.layers",
                "before",
            ),
        ],
    )
    def test_says_what_was_found_and_what_to_do(self, about, changes, status, found, advice):
        result = finding(about, **changes)
        assert result.status == status
        assert re.search(found, result.found)
        assert re.search(advice, result.advice)
        assert bool(result.advice) == bool(advice)

    def test_several_faults_are_all_reported(self):
        report = doctor.report(doctor.examine(replace(WELL, threads=9, huge_pages="never")))
        assert report.endswith("\n2 to mend")
        assert report.count("->") == 2

    def test_the_flags_are_those_that_the_library_asks_the_processor_for(self):
        """On this machine: the sets that the library offers are those that the flags give."""
        facts = collect()
        if facts.cpu_flags is None:
            pytest.skip("not an x86-64 machine")
        best = doctor.best_capability(facts.cpu_flags)
        if best == "amx" and facts.available[-1] != "amx":
            pytest.skip("the system keeps AMX from this process")
        assert best == facts.available[-1]


class TestFacts:
    def test_openmp_runtimes_of_a_map(self):
        line = "7f00-7f01 r-xp 00000000 08:01 {} {}"
        files = [
            "/x y/torch/lib/libgomp.so.1",
            "/sklearn.libs/libgomp-a34b3233.so.1.0.0",
            "/mkl/libiomp5.so",
            "/llvm/libomp.so.5",
        ]
        others = ["/lib/libc.so.6", "/lib/libompi.so.1", "[heap]", "/home/libgomp/notes.txt"]
        text = "\n".join(line.format(i, file) for i, file in enumerate([*files, *others, *files]))
        assert openmp_runtimes(text + "\n7f02-7f03 rw-p 00000000 00:00 0") == tuple(files)

    def test_this_process_has_torchs_runtime(self):
        assert len([path for path in collect().openmp if "torch" in path]) <= 1
        assert collect().openmp

    def test_flags_of_a_processor(self):
        assert cpu_flags("processor\t: 0\nflags\t\t: fpu avx2\nflags\t\t: none") == {"fpu", "avx2"}
        assert cpu_flags("Features : fp asimd") is None

    def test_chosen_word(self):
        assert chosen("always [madvise] never\n") == "madvise"
        assert chosen(None) is None

    @pytest.mark.parametrize(
        ("files", "quota"),
        [
            ({"a/b/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 1.5),
            ({"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4.0),  # of the group above
            ({"cpu.max": "200000 100000"}, 2.0),  # a container that sees its own group as the root
            ({"a/b/cpu.max": "max 100000"}, None),
            ({}, None),
        ],
    )
    def test_quota_of_control_groups_2(self, tmp_path, files, quota):
        write(tmp_path, files)
        assert cpu_quota("0::/a/b\n", tmp_path) == quota

    @pytest.mark.parametrize(
        ("files", "quota"),
        [
            ({"cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 2.5),
            ({"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 0.5),
            ({"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ],
    )
    def test_quota_of_control_groups_1(self, tmp_path, files, quota):
        write(tmp_path, files)
        assert cpu_quota("5:memory:/a\n4:cpu,cpuacct:/a\n0::/a\n", tmp_path) == quota

    def test_every_package_on_the_path_counts_once(self, tmp_path):
        write(tmp_path, {"one/thing/__init__.py": "", "two/thing/__init__.py": "", "three/other.py": ""})
        path = [str(tmp_path / name) for name in ("two", "three", "one", "two")]
        assert folders_of("thing", path) == (str(tmp_path / "two/thing"), str(tmp_path / "one/thing"))

    def test_modules_that_bound_the_function_early(self):
        early, late = types.ModuleType("early"), types.ModuleType("late")
        early.attend = torch.nn.functional.scaled_dot_product_attention
        late.F = torch.nn.functional
        own = sys.modules["torch.nn.functional"]
        assert bound_early({"early": early, "late": late, "torch.nn.functional": own}) == ("early",)


def write(folder, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


class TestCommand:
    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """In a process of its own: what it finds depends on the process."""
        command = [sys.executable, "-m", "attn_ext", "doctor", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def test_forced_instruction_set_is_reported_with_exit_code_1(self, tmp_path):
        if attn_ext.available_cpu_capabilities() == ["baseline"]:
            pytest.skip("there is one instruction set only")
        write(
            tmp_path, {"binds_early.py": "from torch.nn.functional import scaled_dot_product_attention as f"}
        )
        done = self.run(
            *("--import", "binds_early"),
            ATTN_EXT_CPU_CAPABILITY="baseline",
            PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        )
        assert done.returncode == 1, done.stderr
        assert re.search(
            r"^mend  instruction set +baseline, forced by ATTN_EXT_CPU_CAPABILITY", done.stdout, re.M
        )
        assert "does not reach binds_early" in done.stdout
        assert re.search(r"^\d to mend$", done.stdout.splitlines()[-1])

    def test_exit_code_is_1_exactly_if_something_is_to_mend(self, capsys):
        code = main(["doctor"])
        printed = capsys.readouterr().out
        assert code == int(bool(re.search("^mend", printed, re.M)))
        assert printed.count("\n") > len(doctor.CHECKS)

    def test_what_cannot_be_imported_is_named(self, capsys):
        assert main(["doctor", "--import", "no_such_package"]) == 2
        assert "--import no_such_package: ModuleNotFoundError" in capsys.readouterr().err
