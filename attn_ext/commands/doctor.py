"""``attn-ext doctor``: what in this environment makes attn_ext slow or wrong, and what to do about it."""

import argparse
import importlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import CommandError
from .doctor_facts import Facts, collect

FINE, NOTE, MEND = "fine", "note", "mend"

#: What the processor must have for an instruction set, in the words of /proc/cpuinfo; each also needs the
#: sets before it.
NEEDED_FLAGS = {
    "avx2": {"avx2", "fma", "f16c", "popcnt"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16"},
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    about: str
    status: str  # fine; note: worth knowing; mend: should be put right
    found: str
    advice: str = ""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="say what here makes attn_ext slow or wrong, and what to do",
        description="Look at this process and this machine: OpenMP runtimes, threads, cores and container "
        "limits, instruction sets, huge pages, versions, and what override_sdpa() would not reach.",
        epilog="Exit code: 0 when nothing has to be mended, 1 when something has. In a program of your own, "
        "attn_ext.cli.main(['doctor']) looks at the process as it is there.",
    )
    parser.add_argument(
        "--import",
        dest="imports",
        nargs="+",
        default=[],
        metavar="PACKAGE",
        help="import these first, as your program does: they bring runtimes and names of their own",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for name in arguments.imports:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise CommandError(f"--import {name}: {type(error).__name__}: {error}") from error
    findings = examine(collect())
    print(report(findings))
    return int(any(finding.status == MEND for finding in findings))


def examine(facts: Facts) -> list[Finding]:
    """What the facts mean, in the order of the report."""
    return [finding for check in CHECKS for finding in check(facts)]


def report(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.status}  {finding.about:<16} {finding.found}")
        if finding.advice:
            lines.append(f"{'':<22} -> {finding.advice}")
    number = sum(finding.status == MEND for finding in findings)
    lines.append("")
    lines.append(f"{number} to mend" if number else "nothing to mend")
    return "\n".join(lines)


# Checks -------------------------------------------------------------------------------------------


def check_openmp(facts: Facts) -> list[Finding]:
    if not facts.openmp:
        return [Finding("OpenMP", NOTE, "no runtime found in this process", "")]
    if len(facts.openmp) == 1:
        return [Finding("OpenMP", FINE, f"one runtime, {facts.openmp[0]}")]
    return [
        Finding(
            "OpenMP",
            MEND,
            f"{len(facts.openmp)} runtimes in this process, each with threads of its own: "
            + ", ".join(facts.openmp),
            "install the packages that bring them from one source (all by pip, or all by conda), or set "
            "OMP_NUM_THREADS so that their threads together are not more than the cores; "
            "torch.set_num_threads rules torch's and attn_ext's alone",
        )
    ]


def usable_cores(facts: Facts) -> int:
    """As many threads as can run at a time: a part of a core counts as one."""
    limit = facts.affinity if facts.quota is None else min(facts.affinity, math.ceil(facts.quota))
    return max(1, limit)


def check_threads(facts: Facts) -> list[Finding]:
    usable = usable_cores(facts)
    quota = "" if facts.quota is None else f", the container's limit is {facts.quota:g}"
    cores = f"{facts.threads} threads; {facts.affinity} of {facts.cores} cores may be used{quota}"
    if facts.threads > usable:
        advice = f"OMP_NUM_THREADS={usable}, or torch.set_num_threads({usable}): more threads than cores wait"
        return [Finding("threads", MEND, cores, advice)]
    return [Finding("threads", FINE, cores)]


def check_affinity(facts: Facts) -> list[Finding]:
    if facts.affinity < facts.cores:
        advice = "if that is not meant: taskset, numactl, GOMP_CPU_AFFINITY or the container's cpuset set it"
        return [Finding("affinity", NOTE, f"bound to {facts.affinity} of {facts.cores} cores", advice)]
    return [Finding("affinity", FINE, f"all {facts.cores} cores")]


def best_capability(flags: frozenset[str]) -> str:
    """The best instruction set that a processor of x86-64 has."""
    best = "baseline"
    for name, needed in NEEDED_FLAGS.items():
        if not needed <= flags:
            break
        best = name
    return best


def check_capability(facts: Facts) -> list[Finding]:
    about, best = "instruction set", facts.available[-1]
    machine = best if facts.cpu_flags is None else best_capability(facts.cpu_flags)
    if machine != best and machine not in facts.available:
        advice = "build attn_ext again with GCC 11 or Clang 14, or later ones: this build has no such kernels"
        return [Finding(about, MEND, f"the processor has {machine}, the build {best} at best", advice)]
    if facts.capability != best:
        advice = f"unset ATTN_EXT_CPU_CAPABILITY to use {best}, unless it is for a comparison"
        found = f"{facts.capability}, forced by ATTN_EXT_CPU_CAPABILITY={facts.forced}; {best} is there"
        return [Finding(about, MEND, found, advice)]
    if machine == "amx" and best != "amx":
        advice = "unset ATTN_EXT_MATRIX_UNIT, or use Linux 5.16 or later, which hands AMX to processes"
        found = f"{best}; the processor has AMX, which this process may not use"
        return [Finding(about, NOTE, found, advice)]
    if facts.cpu_flags is not None and best == "baseline":
        advice = "a machine or virtual machine with AVX2 is several times faster"
        return [Finding(about, NOTE, "the processor has no AVX2", advice)]
    return [Finding(about, FINE, f"{facts.capability}, the best of processor and build")]


def check_huge_pages(facts: Facts) -> list[Finding]:
    if facts.huge_pages is None:
        return [Finding("huge pages", NOTE, "this system does not say whether it has them")]
    if facts.huge_pages == "never":
        advice = (
            "on the host, as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; without them "
            "the first touch of large results and gradients takes longer"
        )
        return [Finding("huge pages", MEND, "off (never)", advice)]
    return [Finding("huge pages", FINE, facts.huge_pages)]


def check_torch(facts: Facts) -> list[Finding]:
    built, running = (version.partition("+")[0] for version in (facts.torch_built, facts.torch_running))
    found = f"built against {facts.torch_built}, running under {facts.torch_running}"
    if built.split(".")[:2] != running.split(".")[:2]:
        advice = f"pip install 'torch=={'.'.join(built.split('.')[:2])}.*', or build attn_ext again"
        return [Finding("torch", MEND, found, advice)]
    return [Finding("torch", FINE, found)]


def check_folders(facts: Facts) -> list[Finding]:
    findings = []
    for package, folders in (("attn_ext", facts.attn_ext_folders), ("torch", facts.torch_folders)):
        if len(folders) > 1:
            found = f"{len(folders)} of {package} on the path, the first is used: " + ", ".join(folders)
            advice = (
                f"uninstall all but one (pip uninstall {package}), and look at PYTHONPATH and where you stand"
            )
            findings.append(Finding("path", MEND, found, advice))
    return findings or [Finding("path", FINE, "one attn_ext and one torch")]


def check_integrations(facts: Facts) -> list[Finding]:
    findings = []
    for package, version, (first, last) in facts.integrations:
        found = f"{version}, tested with {first} to {last}"
        low, high = _numbers(first), _numbers(last)
        if low <= _numbers(version) and _numbers(version)[: len(high)] <= high:
            findings.append(Finding(package, FINE, found))
        else:
            advice = f"compare with another attention implementation, or install {package} {last}"
            findings.append(Finding(package, MEND, found, advice))
    return findings


def _numbers(version: str) -> list[int]:
    """2.13.0rc1+cpu: 2, 13, 0."""
    return [int(part) for part in re.findall(r"(?:^|\.)(\d+)", version.partition("+")[0])]


def check_bound_early(facts: Facts) -> list[Finding]:
    about = "override_sdpa"
    if not facts.bound_early:
        return [Finding(about, FINE, "no loaded module holds F.scaled_dot_product_attention by its own name")]
    advice = (
        "these call PyTorch's function whatever is overridden: override before they are imported, or convert "
        "the model"
    )
    return [Finding(about, NOTE, "does not reach " + ", ".join(facts.bound_early), advice)]


CHECKS: tuple[Callable[[Facts], list[Finding]], ...] = (
    check_openmp,
    check_threads,
    check_affinity,
    check_capability,
    check_huge_pages,
    check_torch,
    check_folders,
    check_integrations,
    check_bound_early,
)
