"""Compiles a module ahead of time for compiled_module.cpp, and saves inputs with Python's answers.

Usage: python compile_module.py FOLDER
"""

import sys
from pathlib import Path

import torch

import attn_ext


class Answers(torch.nn.Module):
    """An input of each length, and the output for it."""

    def __init__(self, module: torch.nn.Module, lengths: list[int]) -> None:
        super().__init__()
        for length in lengths:
            input = torch.randn(length, 16)
            self.register_buffer(f"input_{length}", input)
            self.register_buffer(f"output_{length}", module(input)[0].detach())


def main() -> None:
    """Writes module.pt2 and answers.pt."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    module = attn_ext.SelfAttention(16).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(module, (torch.randn(5, 16),), dynamic_shapes=({0: length},))
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "module.pt2"))
    torch.jit.script(Answers(module, [10, 100])).save(folder / "answers.pt")


if __name__ == "__main__":
    main()
