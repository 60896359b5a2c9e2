"""What ``attn-ext doctor`` looks at, read from the process and from Linux; nothing here judges."""

import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import types
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import attn_ext
from attn_ext import _build_info

OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


@dataclass(frozen=True)
class Facts:
    """None is what this system does not tell."""

    openmp: tuple[str, ...]  # files of OpenMP runtimes in this process
    threads: int  # torch's
    cores: int  # that the machine has, hyperthreads counted
    affinity: int  # those that this process may run on
    quota: float | None  # cores' worth of time that the container gives
    cpu_flags: frozenset[str] | None  # the processor's features, of x86-64 alone
    capability: str
    available: tuple[str, ...]
    forced: str | None  # ATTN_EXT_CPU_CAPABILITY
    huge_pages: str | None
    torch_built: str
    torch_running: str
    torch_folders: tuple[str, ...]  # every torch on the path, first the one that is imported
    attn_ext_folders: tuple[str, ...]
    integrations: tuple[tuple[str, str, tuple[str, str]], ...]  # package, its version, first and last tested
    bound_early: tuple[str, ...]  # modules that hold F.scaled_dot_product_attention under their own name


def collect() -> Facts:
    """The facts of this process."""
    proc = Path("/proc/self")
    return Facts(
        openmp=openmp_runtimes(_read(proc / "maps") or ""),
        threads=torch.get_num_threads(),
        cores=os.cpu_count() or 1,
        affinity=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota=cpu_quota(_read(proc / "cgroup") or "", Path("/sys/fs/cgroup")),
        cpu_flags=cpu_flags(_read(Path("/proc/cpuinfo")) or ""),
        capability=attn_ext.cpu_capability(),
        available=tuple(attn_ext.available_cpu_capabilities()),
        forced=os.environ.get("ATTN_EXT_CPU_CAPABILITY"),
        huge_pages=chosen(_read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))),
        torch_built=_build_info.torch_version,
        torch_running=torch.__version__,
        torch_folders=folders_of("torch", sys.path),
        attn_ext_folders=folders_of("attn_ext", sys.path),
        integrations=integrations(),
        bound_early=bound_early(sys.modules),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def openmp_runtimes(maps: str) -> tuple[str, ...]:
    """The OpenMP runtimes in the text of /proc/self/maps, each file once."""
    paths = (line.split(None, 5)[5] for line in maps.splitlines() if len(line.split(None, 5)) == 6)
    return tuple(dict.fromkeys(path for path in paths if OPENMP.search(path)))


def cpu_flags(cpuinfo: str) -> frozenset[str] | None:
    """The features that /proc/cpuinfo names for the first processor."""
    found = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(found[1].split()) if found else None


def chosen(text: str | None) -> str | None:
    """The word in brackets: always [madvise] never."""
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else None


def cpu_quota(cgroup: str, mount: Path) -> float | None:
    """The least quota of this process' control groups and those above, in cores: versions 1 and 2.

    Args:
        cgroup: the text of /proc/self/cgroup.
        mount: where the file systems of the groups are, /sys/fs/cgroup.
    """
    quotas = []
    for line in cgroup.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            quotas += [_quota_v2(folder) for folder in _upwards(mount, path)]
        elif "cpu" in controllers.split(","):
            for name in ("cpu", "cpu,cpuacct", "cpuacct,cpu"):
                quotas += [_quota_v1(folder) for folder in _upwards(mount / name, path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _upwards(mount: Path, path: str) -> list[Path]:
    """The group's folder and all above; inside a container the mount itself stands for the group."""
    folder = mount / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent == mount or mount in parent.parents)]


def _quota_v2(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = (int(_read(folder / f"cpu.cfs_{name}_us") or -1) for name in ("quota", "period"))
    return quota / period if quota > 0 and period > 0 else None


def folders_of(package: str, path: list[str]) -> tuple[str, ...]:
    """Where a package lies on a path, the one that is imported first."""
    specs = (PathFinder.find_spec(package, [entry]) for entry in path)
    origins = (Path(spec.origin).resolve() for spec in specs if spec is not None and spec.origin)
    return tuple(dict.fromkeys(str(origin.parent) for origin in origins))


def integrations() -> tuple[tuple[str, str, tuple[str, str]], ...]:
    """The installed packages that attn_ext has an integration for, with the versions it was tested with."""
    if importlib.util.find_spec("attn_ext.integrations") is None:
        return ()
    folder = importlib.import_module("attn_ext.integrations").__path__
    found = []
    for info in pkgutil.iter_modules(folder):
        tested = getattr(
            importlib.import_module(f"attn_ext.integrations.{info.name}"), "TESTED_VERSIONS", None
        )
        if tested is not None:
            try:
                found.append((info.name, version(info.name), tested))
            except PackageNotFoundError:
                continue
    return tuple(found)


def bound_early(modules: dict[str, types.ModuleType]) -> tuple[str, ...]:
    """Modules outside of torch that ran ``from torch.nn.functional import scaled_dot_product_attention``."""
    function = torch._C._nn.scaled_dot_product_attention
    return tuple(
        sorted(
            name
            for name, module in list(modules.items())
            if isinstance(module, types.ModuleType)
            and name.partition(".")[0] not in ("torch", "attn_ext")
            and any(value is function for value in list(vars(module).values()))
        )
    )
