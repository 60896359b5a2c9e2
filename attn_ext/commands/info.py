"""``attn-ext info``: what this build is and what it runs on."""

import argparse
import platform

import torch

import attn_ext
from attn_ext import _build_info


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "info", help="print versions, instruction sets, threads and compiler", description=__doc__
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> None:
    for name, value in facts().items():
        print(f"{name:<17}{value}")


def facts() -> dict[str, str]:
    """What ``attn-ext info`` prints, by name."""
    available = attn_ext.available_cpu_capabilities()
    if "amx" in available and available[-1] != "amx":  # the best one, were there a matrix unit
        available[available.index("amx")] = "amx by vectors"
    return {
        "attn_ext": attn_ext.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}, built against {_build_info.torch_version}",
        "compiler": _build_info.compiler,
        "instruction set": f"{attn_ext.cpu_capability()} (available: {', '.join(available)})",
        "threads": str(torch.get_num_threads()),
        "devices": ", ".join(["cpu", *_accelerators()]),
    }


def _accelerators() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
