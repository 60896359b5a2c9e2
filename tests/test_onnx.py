"""The conformance cases of ONNX `Attention`, from the `onnx` package with the answers it expects."""

import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_ext import reference
from attn_ext.testing import operator

onnx = pytest.importorskip("onnx", reason="the cases come from the onnx package, which is not installed")

WEIGHTS = 3  # the qk_matmul_output_mode that puts out what follows the softmax


@functools.cache
def attention_cases() -> list:
    """Every case that is one node of the operator, not its expansion into others."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, about the NaN that some cases hold
        cases = collect_testcases("Attention")
    return [case for case in cases if len(case.model.graph.node) == 1]


def as_tensor(array, device) -> Tensor:
    if array.dtype.name == "bfloat16":  # ml_dtypes', which torch does not know
        return torch.tensor(array.astype("float32")).to(device, torch.bfloat16)
    return torch.tensor(array, device=device)


def split_heads(x: Tensor, heads: int | None) -> Tensor:
    """(B, L, heads * D) to (B, heads, L, D)."""
    return x if heads is None or x.dim() == 4 else x.unflatten(-1, (heads, -1)).transpose(1, 2)


def pad_mask(mask: Tensor, key_len: int) -> Tensor:
    """A mask may be shorter than the keys: the rest is masked out."""
    hidden = False if mask.dtype == torch.bool else -torch.inf
    return torch.nn.functional.pad(mask, (0, key_len - mask.shape[-1]), value=hidden)


def attend(inputs: dict[str, Tensor], attributes: dict, call: Callable) -> tuple[Tensor, Tensor]:
    """Output and weights of ONNX `Attention` by a function with the signature of `sdpa_with_weights`."""
    query = split_heads(inputs["Q"], attributes.get("q_num_heads"))
    key, value = (split_heads(inputs[n], attributes.get("kv_num_heads")) for n in "KV")
    query_offset = 0
    if "past_key" in inputs:
        query_offset = inputs["past_key"].shape[-2]
        key = torch.cat((inputs["past_key"], key), -2)
        value = torch.cat((inputs["past_value"], value), -2)
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    options = {
        "is_causal": bool(attributes.get("is_causal", 0)),
        "scale": attributes.get("scale"),
        "softcap": attributes.get("softcap", 0.0),
        "window_left": None if left < 0 else left,
        "window_right": None if right < 0 else right,
        "enable_gqa": True,
    }
    mask = inputs.get("attn_mask")
    if mask is not None:
        mask = pad_mask(mask, key.shape[-2])
    if "nonpad_kv_seqlen" not in inputs:
        return call(query, key, value, mask, query_offset=query_offset, **options)

    # Each sample has its own number of keys, of which the last belongs to the last query.
    results = []
    for b, length in enumerate(inputs["nonpad_kv_seqlen"].tolist()):
        of_sample = mask if mask is None or mask.dim() < 4 or mask.shape[0] == 1 else mask[b : b + 1]
        results.append(
            call(
                query[b : b + 1],
                key[b : b + 1, :, :length],
                value[b : b + 1, :, :length],
                None if of_sample is None else of_sample[..., :length],
                query_offset=length - query.shape[-2],
                **options,
            )
        )
    pad = [(out, torch.nn.functional.pad(w, (0, key.shape[-2] - w.shape[-1]))) for out, w in results]
    return torch.cat([out for out, _ in pad]), torch.cat([w for _, w in pad])


def exact_output(inputs: dict[str, Tensor], attributes: dict) -> Tensor:
    """In float64, rounded once."""
    wide = {name: x.cpu().double() if x.is_floating_point() else x.cpu() for name, x in inputs.items()}
    return attend(wide, attributes, reference.sdpa_with_weights)[0].to(inputs["Q"])


@pytest.mark.parametrize("case", attention_cases(), ids=lambda case: case.name)
def test_conforms(case, device):
    (node,) = case.model.graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for arrays, expected in case.data_sets:
        given = [name for name in node.input if name]
        inputs = dict(zip(given, (as_tensor(a, device) for a in arrays), strict=True))
        outputs = dict(zip((n for n in node.output if n), expected, strict=True))
        output, weights = attend(inputs, attributes, operator("sdpa_with_weights"))
        answer = as_tensor(outputs["Y"], device)
        if inputs["Q"].dim() == 3:
            answer = answer.unflatten(-1, (output.shape[1], -1)).transpose(1, 2)
        if output.is_cuda and output.dtype == torch.float16:
            # The answers in float16 were computed in float16 step by step, and err by about what they allow;
            # a GPU's kernels, F.sdpa's as well, err less, but to the other side.
            answer = exact_output(inputs, attributes)
        # The answers in bfloat16 were computed in bfloat16 step by step: two of its roundings are allowed.
        rtol = max(case.rtol, 2**-6 if output.dtype == torch.bfloat16 else 0)
        tolerance = {"rtol": rtol, "atol": case.atol}
        torch.testing.assert_close(output, answer, **tolerance)
        if "qk_matmul_output" in outputs and attributes.get("qk_matmul_output_mode", 0) == WEIGHTS:
            torch.testing.assert_close(weights, as_tensor(outputs["qk_matmul_output"], device), **tolerance)


def test_there_are_cases():
    assert len(attention_cases()) >= 40
