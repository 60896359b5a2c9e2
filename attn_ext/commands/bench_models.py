"""``attn-ext bench --model``: whole models, with attn_ext and without."""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

import attn_ext
from attn_ext.benchmark import memory, model_report, models, profile, timing

from . import CommandError, bench

#: Options of `attn-ext bench` that are about the grid of cells, and their values when they are not given.
OF_CELLS: dict[str, Any] = {
    "cells": None,
    "outside": False,
    "shape": None,
    "mask": None,
    "mode": ["fwd"],
    "peers": None,
    "without": False,
    "plot": None,
}
OF_MODELS: dict[str, Any] = {
    "task": None,
    "batch": None,
    "length": None,
    "new_tokens": None,
    "eager": False,
    "no_memory": False,
    "profile": False,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "whole models",
        "With --model, a whole model with random weights is timed with attn_ext's attention and with its "
        "own, in alternating blocks, and each one's peak memory is measured in a process of its own.",
    )
    group.add_argument(
        "--model",
        metavar="NAME",
        help=f"{', '.join(models.FACTORIES)}, or path.py:factory, a function that returns (model, inputs)",
    )
    group.add_argument("--task", nargs="+", choices=models.TASKS, help="(default: all that the model can do)")
    group.add_argument("--batch", type=bench.positive, help="(default: the model's own)")
    group.add_argument("--length", type=bench.positive, help="tokens of text (default: the model's own)")
    group.add_argument("--new-tokens", type=bench.positive, help="that generation makes (default: 32)")
    group.add_argument("--eager", action="store_true", help='time attn_implementation="eager", too')
    group.add_argument("--no-memory", action="store_true", help="leave peak memory out, which takes a while")
    group.add_argument(
        "--profile",
        action="store_true",
        help="show what a call's time goes to: matrix products, attention, copies and masks, the rest",
    )


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that go with the grid alone, or with models alone."""
    for name, default in (OF_CELLS if arguments.model else OF_MODELS).items():
        if getattr(arguments, name) != default:
            what = "the grid of cells, not with --model" if arguments.model else "--model alone"
            raise CommandError(f"--{name.replace('_', '-')} goes with {what}")


def run(arguments: argparse.Namespace) -> None:
    specs = [
        models.Spec(arguments.model, arguments.batch, arguments.length, dtype, arguments.new_tokens or 32)
        for dtype in dict.fromkeys(arguments.dtype)
    ]
    results: list[model_report.Result] = []
    try:
        with bench.threads(arguments.threads):
            for spec in specs:
                results.extend(measure(spec, arguments))
    except (models.ModelError, ImportError) as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    if results:
        show(results, arguments)


def show(results: list[model_report.Result], arguments: argparse.Namespace) -> None:
    threads = arguments.threads or torch.get_num_threads()
    print(f"{threads} threads, {attn_ext.cpu_capability()}, torch {torch.__version__}\n")
    print(model_report.as_markdown(results) if arguments.markdown else model_report.as_table(results))
    warning = model_report.warning(results)
    if warning is not None:
        sys.stdout.flush()
        print(f"\n{warning}", file=sys.stderr)
    if arguments.json:
        versions = {"attn_ext": attn_ext.__version__, "torch": torch.__version__, "threads": threads}
        numbers = model_report.as_json(results, **versions)
        bench.write(arguments.json, lambda: arguments.json.write_text(json.dumps(numbers, indent=1) + "\n"))
        print(f"\nnumbers  {arguments.json}")


def measure(spec: models.Spec, arguments: argparse.Namespace) -> Iterator[model_report.Result]:
    """Every task in turn."""
    workload = models.load(spec)
    tasks = list(dict.fromkeys(arguments.task or workload.tasks))
    for task in tasks:
        if task not in workload.tasks:
            raise models.ModelError(f"{spec.name} has no {task}: it can do {' and '.join(workload.tasks)}")
    contenders = models.Contenders(workload.model)
    names = [contenders.default, models.OURS]
    if arguments.eager and models.EAGER not in names:
        names.append(models.EAGER)
    steps = arguments.rounds + (arguments.profile + (not arguments.no_memory)) * len(names)
    with bench.progress(len(tasks) * steps) as bar:
        bar.show(f"{spec.name}: comparing outputs")
        difference = output_difference(workload, contenders)
        for task in tasks:
            timings = time_task(workload, contenders, task, names, arguments, bar)
            shares = profile_task(workload, contenders, task, names, bar) if arguments.profile else {}
            peaks: dict[str, memory.Peak] = {}
            for name in names if not arguments.no_memory else []:
                bar.show(f"{spec.name} {task}: memory of {name}")
                peaks[name] = memory.peak(spec, task, name, torch.get_num_threads())
                bar.advance()
            sizes = in_words(workload.inputs)
            found = (timings, peaks, difference, shares)
            yield model_report.make_result(spec.name, spec.dtype, task, sizes, *found)


def time_task(
    workload: models.Workload,
    contenders: models.Contenders,
    task: str,
    names: list[str],
    arguments: argparse.Namespace,
    bar: bench.Bar,
) -> dict[str, timing.Timing]:
    """Blocks of calls in alternation; the attention is changed between them, outside of what is timed."""
    method = timing.Method(arguments.block, arguments.rounds, arguments.limit)
    with contenders.changing() as change:

        def on_block(name: str, turn: int) -> None:
            again = turn >= method.rounds
            bar.show(f"{workload.name} {task}: {name}" + ", again" * again)
            change(name)
            if name == models.OURS and not again:
                bar.advance()

        call = workload.prepare(task)
        try:
            return timing.alternate(dict.fromkeys(names, call), method, on_block)
        finally:
            workload.model.zero_grad(set_to_none=True)


def profile_task(
    workload: models.Workload, contenders: models.Contenders, task: str, names: list[str], bar: bench.Bar
) -> dict[str, dict[str, float]]:
    """What a call's time goes to, by contender; a call before it wakes whatever sleeps."""
    shares = {}
    call = workload.prepare(task)
    for name in names:
        bar.show(f"{workload.name} {task}: where the time of {name} goes")
        with contenders.using(name):
            call()
            shares[name] = profile.shares(call)
        workload.model.zero_grad(set_to_none=True)
        bar.advance()
    return shares


def output_difference(workload: models.Workload, contenders: models.Contenders) -> float:
    """Between our output and the default's, as a part of the largest number in it."""
    call = workload.prepare("inference")
    outputs = []
    for name in (contenders.default, models.OURS):
        with contenders.using(name):
            outputs.append(models.first_tensor(call()).double())
    expected, actual = outputs
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def in_words(inputs: Any) -> str:
    """The names and sizes of the tensors, without the labels."""
    pairs = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    sizes = [
        f"{name} {' x '.join(map(str, tensor.shape))}"
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor) and name not in ("labels", "attention_mask")
    ]
    return ", ".join(sizes)
