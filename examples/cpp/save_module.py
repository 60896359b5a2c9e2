"""Saves a scripted module for scripted_module.cpp, and beside it an input with the answer that Python gets.

Usage: python save_module.py FOLDER
"""

import sys
from pathlib import Path

import torch

import attn_ext


class Answer(torch.nn.Module):
    """An input, the output for it, and the gradients of the output's sum of squares."""

    def __init__(self, module: torch.nn.Module, input: torch.Tensor) -> None:
        super().__init__()
        output, _ = module(input)
        parameters = dict(module.named_parameters())
        gradients = torch.autograd.grad(output.square().sum(), [input, *parameters.values()])
        names = ["grad_input", *("grad_" + name.replace(".", "_") for name in parameters)]
        tensors = {"input": input, "output": output, **dict(zip(names, gradients, strict=True))}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach())


def main() -> None:
    """Writes module.pt and answer.pt."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    module = attn_ext.SelfAttention(16)
    input = torch.randn(2, 10, 16, requires_grad=True)
    torch.jit.script(module).save(folder / "module.pt")
    torch.jit.script(Answer(module, input)).save(folder / "answer.pt")


if __name__ == "__main__":
    main()
