"""Names of attentions inside of TorchScript and of exported programs, where no hook of a module runs.

The graph of such a module says in which order its modules attend. Where that order does not depend on data,
the calls seen while it runs are named by it, one after the other; else they have the name of the whole.
"""

from typing import Any

import torch
from torch import nn

from .. import functional
from ._watch import OPS

Path = str


class ScriptedNames:
    """Names the calls of the scripted and exported modules in a model.

    Attributes:
        is_model: whether the model itself is scripted, so that its methods can be called past its hooks.
        classes: the class of each attention that was named, as far as it is known.
    """

    def __init__(self, model: nn.Module, paths: dict[nn.Module, Path]) -> None:
        self.is_model = isinstance(model, torch.jit.ScriptModule)
        self.classes: dict[Path, str] = {}
        self._sequences: dict[Path, list[Path]] = {}
        self._counts: dict[Path, int] = {}
        for module, path in paths.items():
            if isinstance(module, torch.jit.ScriptModule):
                self._sequences[path] = sequence_of(module, path)
                names = {found: module for module, found in paths.items()}
                self.classes |= {n: _class_name(names[n]) for n in self._sequences[path] if n in names}
            elif hasattr(module, "graph") and hasattr(module.graph, "nodes"):
                self._sequences[path] = self._exported(module, path)

    def begin(self, path: Path) -> None:
        self._counts[path] = 0

    def next_call(self, path: Path) -> Path:
        """The name of a call that was made while the module at ``path`` ran."""
        sequence = self._sequences.get(path)
        if not sequence:
            return path
        number = self._counts.get(path, 0)
        self._counts[path] = number + 1
        return sequence[number % len(sequence)]

    def _exported(self, module: Any, path: Path) -> list[Path]:
        """From the stack of modules that each node of an exported graph carries."""
        found: list[Path] = []
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                return []  # a branch or a loop
            if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in OPS:
                continue
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            if not stack:
                return []
            inner, kind = stack[-1]
            name = ".".join(filter(None, [path, inner]))
            found.append(name)
            self.classes[name] = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
        return found


def _class_name(module: nn.Module) -> str:
    return str(getattr(module, "original_name", type(module).__name__))


def sequence_of(module: Any, path: Path) -> list[Path]:
    """The paths of the attentions that a scripted module calls, in order; [] if data decide."""
    try:
        return _of_block(module, module.graph, path)
    except (_DependsOnData, RuntimeError, AttributeError):
        return []


class _DependsOnData(Exception):
    """The order of the calls is not known before they are made."""


def _of_block(module: Any, block: Any, path: Path) -> list[Path]:
    found: list[Path] = []
    for node in block.nodes():
        found += _of_node(module, node, path)
    return found


def _of_node(module: Any, node: Any, path: Path) -> list[Path]:
    kind = node.kind()
    if kind.startswith("attn_ext::sdpa") or kind == "aten::scaled_dot_product_attention":
        return [path]
    if kind == "prim::CallFunction" and next(iter(node.inputs())).node().s("name") in functional.__all__:
        return [path]
    if kind == "prim::CallMethod":
        return _of_method(module, node, path)
    branches = [_of_block(module, block, path) for block in node.blocks()]
    if kind == "prim::If":
        # A branch that raises attends to nothing.
        ways = {tuple(branch) for branch in branches if branch}
        if len(ways) > 1:
            raise _DependsOnData
        return list(next(iter(ways), ()))
    if kind == "prim::Loop" and any(branches) and len(set(branches[0])) > 1:
        raise _DependsOnData
    return [name for branch in branches for name in branch]


def _of_method(module: Any, node: Any, path: Path) -> list[Path]:
    """The calls of a method of the module itself, of one inside it, or of a cache that it was given."""
    names: list[str] = []
    value = next(iter(node.inputs()))
    if _is_cache(value):
        return [path] if node.s("name").startswith("attend") else []
    while value.node().kind() == "prim::GetAttr":
        names.insert(0, value.node().s("name"))
        value = next(iter(value.node().inputs()))
    called = module
    for name in names:
        called = getattr(called, name)
    method = getattr(called, node.s("name"))
    return _of_block(called, method.graph, ".".join([*filter(None, [path]), *names]))


def _is_cache(value: Any) -> bool:
    return str(value.type()).endswith("caches.KeyValueCache")
