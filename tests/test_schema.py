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

by_op = pytest.mark.parametrize("op", OPS)


def schema(op: str) -> torch.FunctionSchema:
    return operator(op).default._schema


class TestLists:
    def test_every_public_op_is_tested(self):
        assert sorted(OPS) == public_ops()

    def test_an_op_that_is_new_would_be_missed(self):
        """The test above can fail."""
        library = torch.library.Library("attn_ext", "FRAGMENT")
        try:
            library.define("sdpa_with_nothing(Tensor query) -> Tensor")
            assert set(public_ops()) - set(OPS) == {"sdpa_with_nothing"}
        finally:
            library._destroy()
        assert sorted(OPS) == public_ops()

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

    def test_explain_takes_what_the_ops_take(self):
        names = [argument.name for argument in schema("sdpa").arguments]
        assert list(inspect.signature(attn_ext.explain).parameters) == names

    def test_the_oracle_has_no_op_of_its_own(self):
        for module in (functional, reference):
            assert {name for name in module.__all__ if name.startswith("sdpa")} == set(OPS)

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
