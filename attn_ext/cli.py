"""The command line, ``attn-ext`` or ``python -m attn_ext``."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import attn_ext

from .commands import CommandError, bench, demo, doctor, info

__all__ = ["main"]

COMMANDS = (demo, bench, info, doctor)


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: the command's own, or 2 for what the user can mend."""
    parser = Parser(prog="attn-ext", description="Masked scaled dot-product attention for PyTorch.")
    parser.add_argument("--version", action="version", version=f"attn_ext {attn_ext.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows '?'
    try:
        code: int | None = parsed.run(parsed)
    except CommandError as error:
        print(f"attn-ext: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code or 0
