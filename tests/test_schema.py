"""What the tests and the Python side take for granted about the ops, against the schemas themselves.

`attn_ext.testing` lists ops, options and tensors by hand, and most tests run over its lists: what is missing
from them would go untested without a word.
"""

import inspect

import pytest
import torch
from torch import Tensor

import attn_ext
from attn_ext import functional, reference, testing
from attn_ext.testing import OPS, Case, gradients, operator, public_ops, tensors, with_seed

#: Which take lengths for a mask; tests/test_packed.py and tests/test_packed_calling.py are about them.
PACKED_OPS = ("sdpa_packed", "sdpa_packed_with_lse")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "query_offsets")

by_op = pytest.mark.parametrize("op", OPS)

# What has shapes of its own, and tests in tests/test_packed.py, test_paged.py and test_merge_partials.py.
SEQUENCE_OPS = ("sdpa_packed", "sdpa_packed_with_lse", "sdpa_paged", "sdpa_paged_with_lse")
OTHER_OPS = ("cache_write_", "merge_partials")


def schema(op: str) -> torch.FunctionSchema:
    return operator(op).default._schema


class TestLists:
    def test_every_public_op_is_tested(self):
        assert sorted((*OPS, *SEQUENCE_OPS, *OTHER_OPS)) == public_ops()

    def test_an_op_that_is_new_would_be_missed(self):
        """The test above can fail."""
        library = torch.library.Library("attn_ext", "FRAGMENT")
        try:
            library.define("sdpa_with_nothing(Tensor query) -> Tensor")
            assert set(public_ops()) - {*OPS, *SEQUENCE_OPS, *OTHER_OPS} == {"sdpa_with_nothing"}
        finally:
            library._destroy()
        assert "sdpa_with_nothing" not in public_ops()

    @by_op
    def test_options_are_all_and_have_their_defaults(self, op):
        arguments = schema(op).arguments
        assert [argument.name for argument in arguments[:3]] == ["query", "key", "value"]
        assert {argument.name: argument.default_value for argument in arguments[3:]} == testing.OPTIONS
        assert all(argument.has_default_value() for argument in arguments[3:])

    @by_op
    def test_tensors_are_all_differentiated(self, op):
        taken = [a.name for a in schema(op).arguments if "Tensor" in str(a.type)]
        assert tuple(taken) == testing.DIFFERENTIABLE

    @by_op
    def test_python_has_a_function_and_an_oracle_for_each(self, op):
        names = [argument.name for argument in schema(op).arguments]
        assert list(inspect.signature(getattr(functional, op)).parameters) == names
        assert op in functional.__all__
        assert op in attn_ext.__all__
        assert op in reference.__all__
        assert set(names) <= {*inspect.signature(reference.attention).parameters}

    @pytest.mark.parametrize("op", PACKED_OPS)
    def test_packed_ops_differ_by_their_lengths_alone(self, op):
        arguments = {a.name: a for a in schema(op).arguments}
        assert set(arguments) ^ set(testing.OPTIONS) == {
            *("query", "key", "value", "attn_mask", "query_offset"),
            *LENGTHS,
        }
        for name in testing.OPTIONS.keys() & arguments:
            assert arguments[name].default_value == testing.OPTIONS[name]
            assert arguments[name].kwarg_only == (name not in ("dropout_p", "is_causal"))
        assert [n for n in LENGTHS if not arguments[n].has_default_value()] == ["cu_seqlens_q"]
        assert [r.name for r in schema(op).returns if r.name] == (["output", "lse"] if "lse" in op else [])

    @pytest.mark.parametrize("op", [*SEQUENCE_OPS, *OTHER_OPS])
    def test_python_has_the_arguments_and_defaults_of_the_others(self, op):
        assert op in functional.__all__
        assert op in attn_ext.__all__
        parameters = inspect.signature(getattr(functional, op)).parameters
        assert [*parameters] == [argument.name for argument in schema(op).arguments]
        for argument in schema(op).arguments:
            if argument.has_default_value():
                assert parameters[argument.name].default == argument.default_value
            else:
                assert parameters[argument.name].default is inspect.Parameter.empty

    @pytest.mark.parametrize("op", SEQUENCE_OPS)
    def test_the_others_have_an_oracle(self, op):
        assert op in reference.__all__
        oracle = inspect.signature(getattr(reference, op.removesuffix("_with_lse") + "_with_lse")).parameters
        own = {"dropout_seed", "dtype", "options"}
        assert {*oracle} - own <= {argument.name for argument in schema(op).arguments}

    def test_explain_takes_what_the_ops_take(self):
        names = [argument.name for argument in schema("sdpa").arguments]
        assert list(inspect.signature(attn_ext.explain).parameters) == names

    def test_the_oracle_has_no_op_of_its_own(self):
        for module in (functional, reference):
            assert {name for name in module.__all__ if name.startswith("sdpa")} == {*OPS, *SEQUENCE_OPS}

    def test_the_oracle_refuses_a_mask_that_the_ops_refuse(self):
        """Integers are neither a mask nor a bias."""
        arguments = Case("").build(torch.float64)
        for kind in (torch.int64, torch.uint8):
            mask = torch.ones(5, 7, dtype=kind)
            with pytest.raises(ValueError, match=f"must be bool .* or floating, got {kind}"):
                arguments(reference.sdpa, attn_mask=mask)
            with pytest.raises(RuntimeError, match="expected attn_mask to be of dtype Bool"):
                arguments(operator("sdpa"), attn_mask=mask)


class TestOutputs:
    @by_op
    def test_the_oracle_gives_as_many(self, op):
        arguments = Case("").build(torch.float64)
        expected = [result.name for result in schema(op).returns]
        assert len(tensors(arguments(operator(op)))) == len(expected)
        assert len(tensors(arguments(getattr(reference, op)))) == len(expected)

    @by_op
    def test_each_is_differentiable(self, op):
        """Which the derivatives' tests take for granted."""
        outputs = tensors(Case("", sinks=True).build(torch.float64).leaves()(operator(op)))
        assert all(output.is_floating_point() and output.requires_grad for output in outputs)

    @by_op
    def test_with_a_seed_they_are_those_of_the_op(self, op):
        arguments = Case("").build(torch.float64)
        plain, seeded = tensors(arguments(operator(op))), tensors(arguments(with_seed(op, 1)))
        assert len(plain) == len(seeded)
        assert all(map(torch.equal, plain, seeded))

    def test_with_a_seed_an_unknown_op_is_refused(self):
        """Rather than tested by the first output alone."""
        with pytest.raises(KeyError, match="sdpa_with_nothing"):
            with_seed("sdpa_with_nothing", 1)

    def test_gradients_are_taken_of_floating_outputs(self):
        """An op may return what has no derivative: indices, or flags."""

        def with_best_key(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            scores = query @ key.mT
            return scores @ value, scores.argmax(-1)

        def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return with_best_key(query, key, value)[0]

        arguments = Case("").build(torch.float64)
        torch.testing.assert_close(gradients(with_best_key, arguments), gradients(alone, arguments))

    def test_a_floating_output_without_a_gradient_is_an_error(self):
        """It is not left out in silence."""

        def forgetful(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return query @ key.mT @ value, query.detach().sum(-1)

        with pytest.raises(AssertionError, match=r"output 1 .* has no gradient"):
            gradients(forgetful, Case("").build(torch.float64))
