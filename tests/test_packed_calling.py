"""Packed sequences: every way of calling, and inputs at the edge of what there is."""

import io
import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attn_ext
from attn_ext import reference

NAN, INF = math.nan, math.inf
STARTS = torch.tensor([0, 2, 9])


def rows(count: int = 9, heads: int = 2, dim: int = 4, *, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, heads, dim, dtype=dtype)


def three(dtype: torch.dtype = torch.float64, count: int = 9) -> list[Tensor]:
    return [rows(count, dtype=dtype).requires_grad_() for _ in range(3)]


def of_self(x: Tensor, source=attn_ext, **options) -> Tensor:
    return source.sdpa_packed(x, x, x, STARTS, is_causal=True, **options)


def assert_as_reference(tensors: list[Tensor], *starts: Tensor, **options) -> None:
    """Outputs, lse and the gradients of both."""
    results = []
    for source in (attn_ext, reference):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        output, lse = source.sdpa_packed_with_lse(*leaves, *starts, **options)
        loss = output.sin().sum() + lse.masked_fill(lse == -INF, 0.0).sin().sum()
        results.append([output, lse, *torch.autograd.grad(loss, leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


class TestTransforms:
    def test_forward_mode(self):
        x, along = rows(), rows()
        actual = torch.func.jvp(of_self, (x,), (along,))
        expected = torch.func.jvp(lambda x: of_self(x, reference), (x,), (along,))
        torch.testing.assert_close(actual, expected)

    def test_jacobians(self):
        x = rows(dim=2)
        expected = torch.autograd.functional.jacobian(lambda x: of_self(x, reference), x)
        torch.testing.assert_close(torch.func.jacrev(of_self)(x), expected)
        torch.testing.assert_close(torch.func.jacfwd(of_self)(x), expected)

    def test_hessian(self):
        x = rows(heads=1, dim=2)
        expected = torch.autograd.functional.hessian(lambda x: of_self(x, reference).square().sum(), x)
        actual = torch.func.hessian(lambda x: of_self(x).square().sum())(x)
        torch.testing.assert_close(actual, expected)

    def test_gradients_of_each_sample(self):
        """The dim of the samples anywhere, and keys and sinks that all samples share."""
        queries, key, sinks = rows(9 * 3).view(9, 3, 2, 4), rows(), torch.randn(2, dtype=torch.float64)

        def loss(key, sinks, query):
            return attn_ext.sdpa_packed(query, key, key, STARTS, sinks=sinks).sin().sum()

        gradient = torch.func.grad(loss, (0, 1, 2))
        together = torch.vmap(gradient, in_dims=(None, None, 1))(key, sinks, queries)
        alone = zip(*(gradient(key, sinks, query) for query in queries.unbind(1)), strict=True)
        for actual, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(actual, torch.stack(expected))

    def test_vmap_draws_what_a_loop_draws(self):
        x = torch.randn(3, 9, 2, 4)
        torch.manual_seed(0)
        together = torch.vmap(lambda x: of_self(x, dropout_p=0.5), randomness="same")(x)
        for actual, sample in zip(together, x, strict=True):
            torch.manual_seed(0)
            torch.testing.assert_close(actual, of_self(sample, dropout_p=0.5))

    def test_lengths_are_not_vmapped(self):
        x = rows()
        with pytest.raises(RuntimeError, match="cu_seqlens and their like not to be vmapped"):
            torch.vmap(lambda starts: attn_ext.sdpa_packed(x, x, x, starts))(STARTS.expand(2, 3))

    def test_every_derivative_with_dropout_sinks_and_window(self):
        x, sinks = rows(6, dim=3).requires_grad_(), torch.randn(2, dtype=torch.float64, requires_grad=True)

        def function(x, sinks):
            torch.manual_seed(1)
            starts = torch.tensor([0, 2, 6])
            return attn_ext.sdpa_packed(x, x, x, starts, sinks=sinks, dropout_p=0.3, window_left=1)

        assert torch.autograd.gradcheck(function, (x, sinks), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, (x, sinks))


class TestCalling:
    def test_saved_by_torchscript(self):
        class Model(torch.nn.Module):
            def forward(self, x: Tensor, starts: Tensor) -> Tensor:
                output, lse = attn_ext.sdpa_packed_with_lse(x, x, x, starts, is_causal=True, window_left=2)
                other, other_lse = attn_ext.sdpa_packed_with_lse(
                    x, x, 2 * x, starts, seqlens_k=starts[1:] * 0
                )
                return attn_ext.merge_partials([output, other], [lse.t(), other_lse.t()])[0]

        file, x = io.BytesIO(), rows()
        torch.jit.save(torch.jit.script(Model()), file)
        file.seek(0)
        assert torch.equal(torch.jit.load(file)(x, STARTS), of_self(x, window_left=2))

    def test_checkpoint_draws_again(self):
        x = rows().requires_grad_()
        grads = []
        for call in (of_self, lambda x, **o: checkpoint(of_self, x, use_reentrant=False, **o)):
            torch.manual_seed(0)
            grads += torch.autograd.grad(call(x, dropout_p=0.5).sin().sum(), x)
        assert torch.equal(*grads)

    def test_deterministic_mode_fills_nothing_with_nan(self):
        x = rows(12).requires_grad_()
        torch.use_deterministic_algorithms(True)
        try:
            output, lse = attn_ext.sdpa_packed_with_lse(x, x, x, STARTS)
            output.sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        assert not output[9:].any()
        assert (lse[:, 9:] == -INF).all()
        assert not x.grad[9:].any()

    def test_autocast_casts_what_it_casts_in_sdpa(self):
        x = torch.randn(9, 2, 4)
        with torch.autocast("cpu", torch.bfloat16):
            output, lse = attn_ext.sdpa_packed_with_lse(x, x.bfloat16(), x, STARTS, sinks=torch.randn(2))
        assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)

    def test_lengths_may_be_written_to_after_the_call(self):
        """Backward has a copy of them."""
        (first, second), starts = three()[:2], STARTS.clone()
        output = attn_ext.sdpa_packed(first, second, second, starts)
        starts[1] = 5
        expected = attn_ext.sdpa_packed(first, second, second, STARTS)
        grads = (torch.autograd.grad(o.sin().sum(), (first, second)) for o in (output, expected))
        assert all(map(torch.equal, *grads))

    def test_inputs_written_to_after_the_call_are_an_error(self):
        leaf = rows().requires_grad_()
        x = leaf * 1
        output = of_self(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()

    @pytest.mark.parametrize("place", range(4))
    def test_one_input_alone_wants_a_gradient(self, place):
        results = []
        torch.manual_seed(5)
        values = [rows() for _ in range(3)] + [torch.randn(2, dtype=torch.float64)]
        for source in (attn_ext, reference):
            tensors = [t.clone().requires_grad_(i == place) for i, t in enumerate(values)]
            output = source.sdpa_packed(*tensors[:3], STARTS, sinks=tensors[3])
            results += torch.autograd.grad(output.sin().sum(), tensors[place])
        torch.testing.assert_close(*results)

    def test_meta_tensors_have_the_shapes(self):
        x, starts = torch.empty(9, 2, 4, device="meta"), STARTS.to("meta")
        output, lse = attn_ext.sdpa_packed_with_lse(x, x, x[..., :3], starts)
        assert (output.shape, lse.shape, output.device.type) == ((9, 2, 3), (2, 9), "meta")

    def test_lengths_on_another_device_are_refused(self):
        x = rows()
        with pytest.raises(RuntimeError, match="cu_seqlens_q"):
            attn_ext.sdpa_packed(x, x, x, STARTS.to("meta"))


EDGES = {
    "one_key_head": ((9, 6, 4), (9, 1, 4), (9, 1, 4), {"enable_gqa": True}),
    "one_key_head_that_broadcasts": ((9, 6, 4), (9, 1, 4), (9, 1, 4), {}),
    "one_query_head_that_broadcasts": ((9, 1, 4), (9, 3, 4), (9, 3, 4), {}),
    "no_head_dim": ((9, 2, 0), (9, 2, 0), (9, 2, 3), {"scale": 1.0}),
    "one_feature": ((9, 2, 1), (9, 2, 1), (9, 2, 1), {}),
    "no_value_dim": ((9, 2, 4), (9, 2, 4), (9, 2, 0), {}),
    "wide_window": ((9, 2, 4), (9, 2, 4), (9, 2, 4), {"window_left": 2**40, "window_right": 2**40}),
    "everything_dropped": ((9, 2, 4), (9, 2, 4), (9, 2, 4), {"dropout_p": 1.0}),
    "far_offsets": (
        *((9, 2, 4), (9, 2, 4), (9, 2, 4)),
        {"query_offsets": torch.tensor([2**40, -(2**40)]), "is_causal": True},
    ),
}


class TestEdges:
    @pytest.mark.parametrize(("query", "key", "value", "options"), EDGES.values(), ids=EDGES)
    def test_sizes_and_options(self, query, key, value, options):
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in (query, key, value)]
        if query[1] < key[1]:  # the reference writes into the query's heads
            expanded = [tensors[0].expand(-1, key[1], -1), *tensors[1:]]
            actual = attn_ext.sdpa_packed(*tensors, STARTS, **options)
            expected = attn_ext.sdpa_packed(*expanded, STARTS, **options)
            if attn_ext.cpu_capability() == "aten":  # whose products of broadcast heads are one product
                torch.testing.assert_close(actual, expected)
            else:
                assert torch.equal(actual, expected)
        else:
            assert_as_reference(tensors, STARTS, **options)

    @pytest.mark.parametrize("starts", [[0], [0, 0, 0], [2, 2], [3]], ids=str)
    def test_nothing_to_attend_to(self, starts):
        for count in (3, 7):
            leaves = three(count=count)
            output, lse = attn_ext.sdpa_packed_with_lse(*leaves, torch.tensor(starts))
            assert not output.any()
            assert (lse == -INF).all()
            assert not any(g.any() for g in torch.autograd.grad(output.sum(), leaves))

    def test_no_rows(self):
        query, key = rows(0).requires_grad_(), rows(5).requires_grad_()
        output = attn_ext.sdpa_packed(query, key, key, torch.tensor([0, 0]), torch.tensor([0, 5]))
        grads = torch.autograd.grad(output.sum(), (query, key))
        assert [g.shape for g in grads] == [(0, 2, 4), (5, 2, 4)]
        assert not grads[1].any()
        assert attn_ext.sdpa_packed(query, query, query, torch.tensor([0])).shape == (0, 2, 4)

    def test_any_strides(self):
        query, key = torch.randn(2, 9, 4, dtype=torch.float64), torch.randn(4, 2, 9, dtype=torch.float64)
        value = torch.randn(9, 2, 8, dtype=torch.float64)
        assert_as_reference([query.transpose(0, 1), key.permute(2, 1, 0), value[..., ::2]], STARTS)
        projected = torch.randn(9, 3, 2, 4, dtype=torch.float64).unbind(1)
        whole = [t.contiguous() for t in projected]
        assert torch.equal(attn_ext.sdpa_packed(*projected, STARTS), attn_ext.sdpa_packed(*whole, STARTS))

    def test_integers_of_either_dtype_and_any_stride(self):
        x, strided = rows(), torch.stack([STARTS, STARTS + 7], 1)[:, 0]
        expected = attn_ext.sdpa_packed(x, x, x, STARTS)
        for starts in (strided, STARTS.int(), strided.int()):
            assert torch.equal(attn_ext.sdpa_packed(x, x, x, starts), expected)
            assert torch.equal(attn_ext.sdpa_packed(x, x, x, starts, STARTS), expected)

    @pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool])
    def test_other_integers_are_refused(self, dtype):
        x = rows()
        with pytest.raises(RuntimeError, match="cu_seqlens_q of dtype Int or Long"):
            attn_ext.sdpa_packed(x, x, x, STARTS.to(dtype))

    @pytest.mark.parametrize("sinks", [[INF, 0.0], [-INF, 1.0], [-INF, -INF], [NAN, 0.0]], ids=str)
    def test_sinks_that_are_not_finite(self, sinks):
        x, sinks = rows(), torch.tensor(sinks, dtype=torch.float64)
        actual, expected = (
            source.sdpa_packed_with_lse(x, x, x, STARTS, sinks=sinks) for source in (attn_ext, reference)
        )
        torch.testing.assert_close(actual, expected, equal_nan=True)

    def test_one_long_sequence_among_many(self):
        starts = torch.tensor([0] + [1] * 500 + [10_000] + [1] * 500).cumsum(0)
        leaves = [torch.randn(11_000, 1, 16, requires_grad=True) for _ in range(3)]
        options = {"is_causal": True, "window_left": 64}
        output, incoming = attn_ext.sdpa_packed(*leaves, starts, **options), torch.randn(11_000, 1, 16)
        grads = torch.autograd.grad(output, leaves, incoming)
        own = slice(500, 10_500)
        alone = [t.detach()[own].transpose(0, 1).requires_grad_() for t in leaves]
        expected = attn_ext.sdpa(*alone, **options)
        assert torch.equal(output[own].transpose(0, 1), expected)
        along = incoming[own].transpose(0, 1)
        for actual, grad in zip(grads, torch.autograd.grad(expected, alone, along), strict=True):
            assert torch.equal(actual[own].transpose(0, 1), grad)
        torch.testing.assert_close(output[:500], leaves[2][:500])  # of one key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("lengths", [[3, 5, 2], [70, 40, 130], [1, 300, 1], [1, 1, 1]], ids=str)
class TestNothingReachesANeighbour:
    @staticmethod
    def packed(lengths, dtype):
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return [rows(sum(lengths), dtype=dtype) for _ in range(4)], ends, slice(int(ends[1]), int(ends[2]))

    @staticmethod
    def assert_only_its_own(tensors, own):
        for t in tensors:
            assert t[: own.start].isfinite().all()
            assert t[own.stop :].isfinite().all()
            assert not t[own].isfinite().all()

    def test_of_what_it_holds(self, lengths, dtype):
        (*tensors, incoming), ends, own = self.packed(lengths, dtype)
        for t in tensors:
            t[own] = NAN
        leaves = [t.requires_grad_() for t in tensors]
        output = attn_ext.sdpa_packed(*leaves, ends, is_causal=True)
        self.assert_only_its_own([output, *torch.autograd.grad(output, leaves, incoming)], own)

    def test_of_what_comes_in(self, lengths, dtype):
        (*tensors, incoming), ends, own = self.packed(lengths, dtype)
        incoming[own] = NAN
        leaves = [t.requires_grad_() for t in tensors]
        output = attn_ext.sdpa_packed(*leaves, ends, is_causal=True)
        self.assert_only_its_own(torch.autograd.grad(output, leaves, incoming), own)

    def test_of_rows_of_nobody(self, lengths, dtype):
        (*tensors, incoming), ends, own = self.packed(lengths, dtype)
        count = torch.tensor([lengths[0], 0, lengths[2]])
        for t in (*tensors, incoming):
            t[own] = NAN
        leaves = [t.requires_grad_() for t in tensors]
        output, lse = attn_ext.sdpa_packed_with_lse(*leaves, ends, seqlens_q=count, seqlens_k=count)
        of_lse = torch.where(lse == -INF, NAN, torch.ones_like(lse))
        grads = torch.autograd.grad((output, lse), leaves, (incoming, of_lse))
        for t in (output, *grads):
            assert t.isfinite().all()
            assert not t[own].any()
