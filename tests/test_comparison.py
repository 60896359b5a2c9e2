"""Every cell of the table of docs/comparison.md, shown by running it: on the CPU, with torch 2.13."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attn_ext
from attn_ext.distributed import SequenceLayout, context_parallel_sdpa, run_in_memory

pytestmark = [
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is about torch 2.13"),
    pytest.mark.filterwarnings("ignore"),
]

DOCUMENT = Path(__file__).parents[1] / "docs" / "comparison.md"
COLUMNS = ("attn_ext", "F.sdpa", "nn.MultiheadAttention", "FlexAttention")
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
ABSENT = None  # there is no argument for it, which test_absent_arguments shows


MULTIHEAD = nn.MultiheadAttention(32, 2, batch_first=True)


def multihead(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
    """nn.MultiheadAttention as it is called by default, on (batch, 2, length, 16)."""
    return MULTIHEAD(*(x.transpose(-3, -2).flatten(-2) for x in (query, key, value)), **options)[0]


CALLS: dict[str, Call] = dict(
    zip(COLUMNS, (attn_ext.sdpa, F.scaled_dot_product_attention, multihead, flex_attention), strict=True)
)


def tensors(*, length: int = 16, requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(2, 2, length, 16, requires_grad=requires_grad) for _ in range(3)]


def backward(call: Call) -> bool:
    query, key, value = tensors(requires_grad=True)
    call(query, key, value).sum().backward()
    return query.grad is not None


def double_backward(call: Call) -> bool:
    query, key, value = tensors(requires_grad=True)
    (gradient,) = torch.autograd.grad(call(query, key, value).square().sum(), query, create_graph=True)
    gradient.square().sum().backward()
    return query.grad is not None


def hessian(call: Call) -> bool:
    query, key, value = tensors(length=2)
    return torch.func.hessian(lambda q: call(q, key, value).square().sum())(query).abs().sum() > 0


def vmap(call: Call) -> bool:
    """Without the warning of the slow fallback."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return torch.vmap(call)(*(x.expand(3, *x.shape) for x in tensors())).shape[0] == 3


def over_ranks() -> bool:
    """Two ranks as threads."""
    whole = tensors()

    def on_rank(rank) -> bool:
        layout = SequenceLayout.zigzag(16, rank)
        own = [layout.shard(x, -2).requires_grad_() for x in whole]
        context_parallel_sdpa(*own, layout=layout, is_causal=True).sum().backward()
        return own[0].grad is not None

    return all(run_in_memory(2, on_rank))


def lse(call: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    query, key, value = tensors(requires_grad=True)
    call(query, key, value)[1].sum().backward()
    return query.grad.abs().sum() > 0


def bounded_memory_with_dropout(call: Callable[..., Tensor]) -> bool:
    """No allocation of length x length numbers, forward and backward."""
    length = 4096
    query, key, value = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        call(query, key, value).sum().backward()
    return max(event.self_cpu_memory_usage for event in profile.events()) < length * length * 4


def multihead_with_dropout(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    module = nn.MultiheadAttention(16, 1, dropout=0.1, batch_first=True)
    return module(query[0], key[0], value[0], need_weights=False)[0]


def empty_row(call: Callable[..., Tensor], **options) -> bool:
    """Row 3 sees no key."""
    query, key, value = tensors()
    return call(query, key, value, **options).isfinite().all()


def hidden_nan(call: Callable[..., Tensor], **options) -> bool:
    """Key 5 holds NaN and no query sees it."""
    query, key, value = tensors()
    key[..., 5, :] = value[..., 5, :] = math.nan
    return call(query, key, value, **options).isfinite().all()


ROW_3_SEES = torch.ones(16, 16, dtype=torch.bool)
ROW_3_SEES[3] = False
KEY_5_SEEN = torch.arange(16) != 5


def block_mask(visible: Callable[..., Tensor]):
    return create_block_mask(visible, None, None, 16, 16, device="cpu")


def any_leading_dims(call: Call) -> bool:
    for shape in ((4, 8), (3, 4, 8), (2, 3, 4, 8), (2, 2, 3, 4, 8)):
        x = torch.randn(shape)
        assert call(x, x, x).shape == shape
    return True


def three_heads_of_one(call: Callable[..., Tensor]) -> bool:
    query = torch.randn(1, 4, 6, 8)
    return call(query, query[:, :2], query[:, :2], enable_gqa=True).shape == query.shape


def script(call: Call) -> bool:
    if call is multihead:
        return torch.jit.script(MULTIHEAD) is not None
    return (
        torch.jit.script(call if call is not F.scaled_dot_product_attention else _scripted_sdpa) is not None
    )


def _scripted_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def exports(call: Call) -> bool:
    class Module(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return call(query, key, value)

    return torch.export.export(Module(), tuple(tensors())) is not None


STARTS = torch.tensor([0, 5, 16])


def in_one(tensor: Tensor) -> Tensor:
    """(rows, heads, head dim)."""
    return tensor[0].transpose(0, 1)


def jagged_backward(call: Call) -> bool:
    rows = [torch.randn(length, 2, 16) for length in (3, 5)]
    leaf = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    call(*[leaf.transpose(1, 2)] * 3).values().sum().backward()
    return leaf.grad.values().isfinite().all()


def multihead_of_jagged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rows = [x.transpose(1, 2).flatten(-2) for x in (query, key, value)]
    return MULTIHEAD(*rows, need_weights=False)[0]


def own_score_function() -> bool:
    return flex_attention(*tensors(), score_mod=lambda score, b, h, i, j: score * (i - j)).isfinite().all()


def each(show: Callable[[Call], bool]) -> dict[str, Callable[[], bool]]:
    return {name: (lambda call=call: show(call)) for name, call in CALLS.items()}


# What the document says in its rows, and what shows it, or does not.
CLAIMS: dict[str, dict[str, Callable[[], bool] | None]] = {
    "attention weights": {
        "attn_ext": lambda: attn_ext.sdpa_with_weights(*tensors())[1].shape == (2, 2, 16, 16),
        "nn.MultiheadAttention": lambda: (
            nn.MultiheadAttention(16, 2)(*[torch.randn(4, 16)] * 3)[1].shape == (4, 4)
        ),
    },
    "log-sum-exp with a gradient": {
        "attn_ext": lambda: lse(attn_ext.sdpa_with_lse),
        "FlexAttention": lambda: lse(lambda q, k, v: flex_attention(q, k, v, return_lse=True)),
    },
    "attention that each key received": {
        "attn_ext": lambda: attn_ext.sdpa_with_key_mass(*tensors())[1].shape == (2, 2, 16),
    },
    "backward": each(backward),
    "double backward": each(double_backward),
    "forward-mode AD, Hessian": each(hessian),
    "`vmap` without the slow fallback": each(vmap),
    "dropout without an Lq x Lk matrix": {
        "attn_ext": lambda: bounded_memory_with_dropout(lambda *x: attn_ext.sdpa(*x, dropout_p=0.1)),
        "F.sdpa": lambda: bounded_memory_with_dropout(
            lambda *x: F.scaled_dot_product_attention(*x, dropout_p=0.1)
        ),
        "nn.MultiheadAttention": lambda: bounded_memory_with_dropout(
            lambda *x: multihead_with_dropout(*x[:3])
        ),
    },
    "a row that sees no key gives 0": {
        "attn_ext": lambda: empty_row(attn_ext.sdpa, attn_mask=ROW_3_SEES),
        "F.sdpa": lambda: empty_row(F.scaled_dot_product_attention, attn_mask=ROW_3_SEES),
        "nn.MultiheadAttention": lambda: empty_row(multihead, attn_mask=~ROW_3_SEES),
        "FlexAttention": lambda: empty_row(flex_attention, block_mask=block_mask(lambda b, h, i, j: i != 3)),
    },
    "NaN behind the mask stays there": {
        "attn_ext": lambda: hidden_nan(attn_ext.sdpa, attn_mask=KEY_5_SEEN),
        "F.sdpa": lambda: hidden_nan(F.scaled_dot_product_attention, attn_mask=KEY_5_SEEN.expand(16, 16)),
        "nn.MultiheadAttention": lambda: hidden_nan(multihead, key_padding_mask=~KEY_5_SEEN.expand(2, 16)),
        "FlexAttention": lambda: hidden_nan(flex_attention, block_mask=block_mask(lambda b, h, i, j: j != 5)),
    },
    "(L, D), (H, L, D), any leading dims": each(any_leading_dims)
    | {"nn.MultiheadAttention": lambda: any_leading_dims(lambda *x: nn.MultiheadAttention(8, 2)(*x)[0])},
    "grouped key/value heads": {
        name: (lambda call=call: three_heads_of_one(call))
        for name, call in CALLS.items()
        if call is not multihead
    },
    "sliding window": {
        "attn_ext": lambda: attn_ext.sdpa(*tensors(), window_left=2, window_right=0).isfinite().all(),
        "FlexAttention": lambda: empty_row(
            flex_attention, block_mask=block_mask(lambda b, h, i, j: i - j <= 2)
        ),
    },
    "softcap": {
        "attn_ext": lambda: attn_ext.sdpa(*tensors(), softcap=5.0).isfinite().all(),
        "FlexAttention": lambda: empty_row(
            flex_attention, score_mod=lambda s, b, h, i, j: 5 * torch.tanh(s / 5)
        ),
    },
    "attention sinks": {
        "attn_ext": lambda: attn_ext.sdpa(*tensors(), sinks=torch.zeros(2)).isfinite().all(),
    },
    "packed sequences, forward and backward": {
        "attn_ext": lambda: backward(lambda *x: attn_ext.sdpa_packed(*map(in_one, x), STARTS)),
        "FlexAttention": lambda: backward(
            lambda *x: flex_attention(*x, block_mask=block_mask(lambda b, h, i, j: (i < 5) == (j < 5)))
        ),
    },
    "jagged nested tensors, forward and backward": {
        "attn_ext": lambda: jagged_backward(attn_ext.sdpa),
        "F.sdpa": lambda: jagged_backward(F.scaled_dot_product_attention),
        "nn.MultiheadAttention": lambda: jagged_backward(multihead_of_jagged),
        "FlexAttention": lambda: jagged_backward(flex_attention),
    },
    "a sequence over several machines, forward and backward": {"attn_ext": over_ranks},
    "any score function of one's own": {"FlexAttention": own_score_function},
    "TorchScript": each(script),
    "`torch.export`": each(exports),
    "says which path a call takes": {
        "attn_ext": lambda: attn_ext.explain(*tensors()).path == "few-rows",
    },
}


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, str]]:
    """The table: row, column, cell."""
    lines = iter(DOCUMENT.read_text(encoding="utf-8").splitlines())
    header = next(cells for line in lines if (cells := _cells(line))[1:2] == ["`attn_ext`"])
    columns = [name.strip("`") for name in header[1:]]
    next(lines)  # |---|
    rows = {}
    for line in lines:
        if not line.startswith("|"):
            break
        row, *cells = _cells(line)
        rows[row] = dict(zip(columns, cells, strict=True))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_rows_and_columns_are_those_that_are_shown_here(table):
    assert list(table) == list(CLAIMS)
    assert all(tuple(row) == COLUMNS for row in table.values())


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", CLAIMS)
def test_cell(table, row, column):
    show = CLAIMS[row].get(column, ABSENT)
    assert table[row][column] == ("yes" if show is not ABSENT and works(show) else "no")


def works(show: Callable[[], bool]) -> bool:
    torch.compiler.reset()
    try:
        return bool(show())
    except Exception:  # however it says that it cannot
        return False


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.scaled_dot_product_attention(*tensors(), need_weights=True),
        lambda: F.scaled_dot_product_attention(*tensors(), return_lse=True),
        lambda: F.scaled_dot_product_attention(*tensors(), window_left=2),
        lambda: F.scaled_dot_product_attention(*tensors(), softcap=5.0),
        lambda: F.scaled_dot_product_attention(*tensors(), sinks=torch.zeros(2)),
        lambda: nn.MultiheadAttention(16, 4, num_kv_heads=2),
        lambda: multihead(*tensors(), return_lse=True),
        lambda: multihead(*tensors(), window_left=2),
        lambda: multihead(*tensors(), softcap=5.0),
        lambda: multihead(*tensors(), sinks=torch.zeros(2)),
        lambda: flex_attention(*tensors(), need_weights=True),
        lambda: flex_attention(*tensors(), dropout_p=0.1),
        lambda: flex_attention(*tensors(), sinks=torch.zeros(2)),
    ],
)
def test_absent_arguments(call):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        call()
