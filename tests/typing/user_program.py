"""A user's program, which `mypy --strict` takes; the calls that it has to refuse are marked, and checked."""

import torch
from torch import Tensor, nn

import attn_ext
from attn_ext.onnx import translation_table


class Block(nn.Module):
    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.attention = attn_ext.MultiHeadAttention(embed_dim, 4, num_kv_heads=2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        output, weights = self.attention.forward(x, is_causal=True, need_weights=True)
        assert weights is not None
        return output


def outputs(query: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    output: Tensor = attn_ext.sdpa(query, query, query, is_causal=True, window_left=3, sinks=sinks)
    _, lse = attn_ext.sdpa_with_lse(query, query, query, softcap=30.0)
    return output, lse


def packed(query: Tensor, starts: Tensor) -> Tensor:
    output: Tensor = attn_ext.sdpa_packed(query, query, query, starts, is_causal=True, seqlens_k=None)
    _, lse = attn_ext.sdpa_packed_with_lse(query, query, query, starts, sinks=None)
    merged, _ = attn_ext.merge_partials([output, output], [lse.T, lse.T])
    return merged


def decode(x: Tensor, attention: attn_ext.MultiHeadAttention) -> Tensor:
    cache = attn_ext.KeyValueCache(2, 100, 4, 16, page_size=16, dtype=torch.int8)
    output, _ = attention.forward(x, is_causal=True, cache=cache)
    cache.append_packed(x, x, torch.tensor([0, 2]), sequences=torch.tensor([1]))
    lengths: Tensor = cache.lengths
    memory: int = cache.nbytes()
    pages, scale = cache.key_pages, cache.key_scale
    return output + attn_ext.sdpa_paged(x, pages, pages, cache.block_table, lengths, key_scale=scale) * memory


path: str = attn_ext.explain(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)).path
names: list[str] = attn_ext.available_cpu_capabilities()
version: str = attn_ext.__version__
table = translation_table(opset=23)

attn_ext.sdpa(1.0, 2.0, 3.0)  # type: ignore[arg-type]
attn_ext.sdpa(torch.ones(2, 3), torch.ones(2, 3))  # type: ignore[call-arg]
attn_ext.KeyValueCache(2, 100, 4, 16, dtype="int8")  # type: ignore[arg-type]
attn_ext.MultiHeadAttention("16", 4)  # type: ignore[arg-type]
wrong: str = attn_ext.sdpa(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3))  # type: ignore[assignment]
