"""The attention modules: shapes, scores, masks, dropout, projections, and every way to carry them on."""

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from attn_ext import CrossAttention, MultiHeadAttention, ScaledDotProductAttention, SelfAttention, reference

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

X = (2, 5, 16)

# name: (module, shapes of the inputs of its forward)
MODULES = {
    "scaled_dot_product": (ScaledDotProductAttention, [(2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)]),
    "self": (lambda: SelfAttention(16), [X]),
    "self_dims_bias": (lambda: SelfAttention(16, head_dim=24, value_dim=28, bias=True), [X]),
    "self_unbatched": (lambda: SelfAttention(16), [(5, 16)]),
    "self_two_batch_dims": (lambda: SelfAttention(16), [(3, 2, 5, 16)]),
    "cross": (lambda: CrossAttention(16), [X, (2, 7, 16)]),
    "cross_context_dim": (lambda: CrossAttention(16, 12, head_dim=8), [X, (2, 7, 12)]),
    "cross_unbatched": (lambda: CrossAttention(16), [(5, 16), (7, 16)]),
    "multi_head": (lambda: MultiHeadAttention(16, 4), [X]),
    "multi_head_no_bias": (lambda: MultiHeadAttention(16, 4, bias=False), [X]),
    "multi_head_unbatched": (lambda: MultiHeadAttention(16, 4), [(5, 16)]),
    "multi_head_two_batch_dims": (lambda: MultiHeadAttention(16, 4), [(3, 2, 5, 16)]),
    "multi_head_cross": (lambda: MultiHeadAttention(16, 4), [X, (2, 7, 16), (2, 7, 16)]),
    "multi_head_grouped": (lambda: MultiHeadAttention(16, 4, num_kv_heads=2), [X]),
    "multi_head_one_kv_head": (lambda: MultiHeadAttention(16, 4, num_kv_heads=1), [X]),
    "multi_head_odd_dims": (lambda: MultiHeadAttention(16, 3, head_dim=5, value_dim=7), [X]),
    "multi_head_no_out_proj": (lambda: MultiHeadAttention(16, 4, out_proj=False), [X]),
    "multi_head_apart": (lambda: MultiHeadAttention(16, 4, packed=False), [X]),
    "multi_head_key_is_value": (lambda: MultiHeadAttention(16, 4, num_kv_heads=2), [X, (2, 7, 16)]),
    "multi_head_key_value_dims": (
        lambda: MultiHeadAttention(16, 4, key_dim=12, value_in_dim=10),
        [X, (2, 7, 12), (2, 7, 10)],
    ),
}


# The constructors, and those of their arguments that are sizes.
SIZED = {
    ScaledDotProductAttention: ("num_heads",),
    functools.partial(SelfAttention, embed_dim=16): ("embed_dim", "head_dim", "value_dim"),
    functools.partial(CrossAttention, embed_dim=16): ("embed_dim", "context_dim", "head_dim", "value_dim"),
    functools.partial(MultiHeadAttention, embed_dim=16, num_heads=4): (
        *("embed_dim", "num_heads", "num_kv_heads"),
        *("head_dim", "value_dim", "key_dim", "value_in_dim"),
    ),
}


@pytest.fixture(params=MODULES)
def case(request, device) -> tuple[nn.Module, list[Tensor]]:
    """A module and inputs for it."""
    make, shapes = MODULES[request.param]
    return make().to(device), [torch.randn(shape, device=device) for shape in shapes]


def oracle(module: nn.Module, *inputs: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Output and weights by the module's projections and the reference."""
    if isinstance(module, ScaledDotProductAttention):
        projected = inputs
    elif isinstance(module, MultiHeadAttention):
        query, key, value = [*inputs, *[inputs[-1]] * (3 - len(inputs))]
        projected = module.project(query, key, value)
        options["enable_gqa"] = True
    else:
        projected = module.project(*inputs)
    output, weights = reference.sdpa_with_weights(*projected, **options)
    output, weights = output.to(inputs[0]), weights.to(inputs[0])
    if isinstance(module, MultiHeadAttention):
        output = module.out_proj(output.transpose(-3, -2).flatten(-2))
    return output, weights


def needs_weights(module: nn.Module) -> dict[str, bool]:
    return {} if isinstance(module, ScaledDotProductAttention) else {"need_weights": True}


class TestEveryModule:
    def test_agrees_with_the_reference(self, case):
        module, inputs = case
        assert_close(module(*inputs, **needs_weights(module)), oracle(module, *inputs))

    def test_weights_only_on_request(self, case):
        module, inputs = case
        output, weights = module(*inputs)
        if isinstance(module, ScaledDotProductAttention):
            assert weights is not None
        else:
            assert weights is None
        assert_close(output, module(*inputs, **needs_weights(module))[0])

    def test_keeps_weights_where_asked(self, case):
        module, inputs = case
        module(*inputs)
        assert module.last_weights is None
        module.keep_weights = True
        module(*inputs)
        assert not module.last_weights.requires_grad
        assert_close(module.last_weights, module(*inputs, **needs_weights(module))[1].detach())
        assert copy.deepcopy(module).last_weights is not None

    def test_bool_mask_true_is_masked_out(self, case):
        module, inputs = case
        mask = torch.rand(inputs[0].shape[-2], inputs[-1].shape[-2], device=inputs[0].device) < 0.4
        mask[1] = True  # a query that sees nothing
        actual = module(*inputs, mask=mask, **needs_weights(module))
        assert_close(actual, oracle(module, *inputs, attn_mask=~mask))
        assert actual[1][..., 1, :].eq(0).all()

    def test_floating_mask_is_added(self, case):
        module, inputs = case
        mask = torch.randn(inputs[0].shape[-2], inputs[-1].shape[-2], device=inputs[0].device)
        mask[:, 2] = -torch.inf
        actual = module(*inputs, mask=mask, **needs_weights(module))
        assert_close(actual, oracle(module, *inputs, attn_mask=mask))

    def test_mask_of_integers_is_refused(self, case):
        module, inputs = case
        mask = torch.zeros(inputs[0].shape[-2], inputs[-1].shape[-2], dtype=torch.int64)
        with pytest.raises(ValueError, match=r"mask must be bool .* or floating"):
            module(*inputs, mask=mask.to(inputs[0].device))

    def test_gradients_reach_inputs_and_parameters(self, case):
        module, inputs = case
        for x in inputs:
            x.requires_grad_()
        output, _ = module(*inputs)
        wanted = [*inputs, *module.parameters()]
        cotangent = torch.randn_like(output)
        actual = torch.autograd.grad(output, wanted, cotangent)
        expected = torch.autograd.grad(oracle(module, *inputs)[0], wanted, cotangent)
        assert_close(actual, expected, atol=2e-5, rtol=2e-5)

    def test_deepcopy_and_pickle(self, case):
        module, inputs = case
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert_close(twin(*inputs), module(*inputs))

    def test_script_saved_and_loaded(self, case):
        module, inputs = case
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(module), file)
        file.seek(0)
        loaded = torch.jit.load(file)
        assert_close(loaded(*inputs, **needs_weights(module)), module(*inputs, **needs_weights(module)))
        loaded.keep_weights = True
        loaded(*inputs)
        assert_close(loaded.last_weights, module(*inputs, **needs_weights(module))[1].detach())

    def test_script_with_masks(self, case):
        module, inputs = case
        mask = torch.rand(inputs[0].shape[-2], inputs[-1].shape[-2], device=inputs[0].device) < 0.3
        scripted = torch.jit.script(module)
        assert_close(scripted(*inputs, mask=mask), module(*inputs, mask=mask))

    def test_state_dict_round_trip(self, case):
        module, inputs = case
        twin = copy.deepcopy(module)
        for parameter in twin.parameters():
            nn.init.zeros_(parameter)
        twin.load_state_dict(module.state_dict())
        assert_close(twin(*inputs), module(*inputs))

    def test_compiles_without_graph_breaks(self, case):
        module, inputs = case
        torch.compiler.reset()
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        assert_close(compiled(*inputs), module(*inputs))

    def test_compiled_module_keeps_weights(self, case):
        module, inputs = case
        module.keep_weights = True
        torch.compiler.reset()
        torch.compile(module, backend="aot_eager", fullgraph=True)(*inputs)
        assert_close(module.last_weights, module(*inputs, **needs_weights(module))[1].detach())

    def test_exports(self, case):
        module, inputs = case
        program = torch.export.export(module, tuple(inputs))
        assert_close(program.module()(*inputs), module(*inputs))

    def test_float64_and_low_precision(self, case):
        module, inputs = case
        expected = module.double()(*(x.double() for x in inputs))[0]
        for dtype, tolerance in ((torch.bfloat16, 5e-2), (torch.float16, 1e-2)):
            low = copy.deepcopy(module).to(dtype)(*(x.to(dtype) for x in inputs))[0]
            assert low.dtype == dtype
            assert_close(low.double(), expected, atol=tolerance, rtol=tolerance)


class TestDropout:
    @pytest.fixture(params=["scaled_dot_product", "self", "cross", "multi_head"])
    def case(self, request, device):
        make = {
            "scaled_dot_product": lambda: ScaledDotProductAttention(dropout=0.5),
            "self": lambda: SelfAttention(16, dropout=0.5),
            "cross": lambda: CrossAttention(16, dropout=0.5),
            "multi_head": lambda: MultiHeadAttention(16, 4, dropout=0.5),
        }[request.param]
        _, shapes = MODULES[request.param]
        return make().to(device), [torch.randn(shape, device=device) for shape in shapes]

    def test_acts_in_training(self, case):
        module, inputs = case
        weights = module(*inputs, **needs_weights(module))[1]
        assert weights.eq(0).any()
        assert_close(weights[weights != 0], 2 * oracle(module, *inputs)[1][weights != 0])

    def test_does_not_act_in_evaluation(self, case):
        module, inputs = case
        assert_close(module.eval()(*inputs, **needs_weights(module)), oracle(module, *inputs))

    def test_acts_in_a_scripted_module_in_training_only(self, case):
        module, inputs = case
        scripted = torch.jit.script(module)
        assert scripted(*inputs, **needs_weights(module))[1].eq(0).any()
        assert_close(scripted.eval()(*inputs)[0], oracle(module, *inputs)[0])

    @pytest.mark.parametrize("dropout", [-0.1, 1.5, float("nan"), float("inf")])
    @pytest.mark.parametrize("make", SIZED)
    def test_outside_of_zero_to_one_is_refused(self, make, dropout):
        with pytest.raises(ValueError, match=rf"^dropout must lie in \[0, 1\], got {dropout}$"):
            make(dropout=dropout)


class TestSizes:
    """As nn.MultiheadAttention: a size of 0 or less is refused. nn.Linear would take 0 with a warning."""

    @pytest.mark.parametrize(
        ("make", "name"), [(make, name) for make, sizes in SIZED.items() for name in sizes]
    )
    @pytest.mark.parametrize("size", [0, -1, -16])
    def test_of_zero_or_less_is_refused(self, make, name, size):
        with pytest.raises(ValueError, match=rf"^{name} must be greater than 0, got {size}$"):
            make(**{name: size})

    @pytest.mark.parametrize(
        ("make", "name"), [(make, name) for make, sizes in SIZED.items() for name in sizes]
    )
    @pytest.mark.parametrize("size", [8.0, "8"])
    def test_that_is_no_int_is_refused(self, make, name, size):
        with pytest.raises(TypeError, match=rf"^{name} must be an int, got {size!r}$"):
            make(**{name: size})

    def test_every_size_is_tried(self):
        """Every argument of a constructor that is a number of things."""
        for make, sizes in SIZED.items():
            constructor = make.func if isinstance(make, functools.partial) else make
            arguments = inspect.signature(constructor).parameters.values()
            ints = {a.name for a in arguments if a.annotation in (int, int | None, "int", "int | None")}
            assert ints == set(sizes)

    def test_of_one_is_a_size(self, device):
        module = MultiHeadAttention(1, 1, key_dim=1, value_in_dim=1, value_dim=1).to(device)
        assert module(torch.randn(2, 3, 1, device=device))[0].shape == (2, 3, 1)

    def test_is_refused_by_torch_as_well(self):
        for arguments in ((0, 1), (-4, 1), (4, 0), (4, -2)):
            with pytest.raises(ValueError, match="must be greater than 0"):
                nn.MultiheadAttention(*arguments)
            with pytest.raises(ValueError, match="must be greater than 0"):
                MultiHeadAttention(*arguments)


class TestKeyPaddingMask:
    @pytest.fixture
    def x(self, device) -> Tensor:
        return torch.randn(X, device=device)

    @pytest.fixture
    def padding(self, device) -> Tensor:
        return torch.arange(5, device=device) >= torch.tensor([[5], [3]], device=device)  # True = ignored

    @pytest.mark.parametrize("make", [lambda: SelfAttention(16), lambda: MultiHeadAttention(16, 4)])
    def test_ignored_keys_have_no_influence(self, x, padding, make):
        module = make().to(x.device)
        output, weights = module(x, key_padding_mask=padding, need_weights=True)
        assert weights[1][..., 3:].eq(0).all()
        assert_close(output[1, :3], module(x[1, :3])[0])
        assert_close(output[0], module(x[0])[0])

    def test_cross_attention_ignores_context(self, x, padding):
        module = CrossAttention(16).to(x.device)
        output, _ = module(x[:, :2], x, key_padding_mask=padding)
        assert_close(output[1], module(x[1, :2], x[1, :3])[0])

    @pytest.mark.parametrize("floating", [False, True])
    @pytest.mark.parametrize(
        "shape", [(5, 5), (2, 1, 5, 5), (2, 1, 1, 5), (1, 4, 5, 5), (8, 5, 5), (1, 5, 5)]
    )
    @pytest.mark.parametrize("kind", ["bool", "float"])
    def test_joins_with_any_mask(self, x, padding, shape, kind, floating):
        module = MultiHeadAttention(16, 4).to(x.device)
        mask = (
            torch.rand(shape, device=x.device) < 0.3
            if kind == "bool"
            else torch.randn(shape, device=x.device)
        )
        if floating:
            padding = torch.zeros(padding.shape, device=x.device).masked_fill(padding, -torch.inf)
        visible = ~(padding == -torch.inf if floating else padding)[:, None, None]
        full = mask.unflatten(0, (2, 4)) if shape == (8, 5, 5) else mask
        bias = torch.zeros(2, 4, 5, 5, device=x.device).masked_fill(~visible, -torch.inf)
        bias = bias.masked_fill(full, -torch.inf) if kind == "bool" else bias + full
        actual = module(x, mask=mask, key_padding_mask=padding, need_weights=True)
        assert_close(actual, oracle(module, x, attn_mask=bias))
        scripted = torch.jit.script(module)
        assert_close(scripted(x, mask=mask, key_padding_mask=padding, need_weights=True), actual)

    def test_joint_mask_is_no_larger_than_the_two_broadcast(self, padding):
        from attn_ext.modules._masks import to_attn_mask

        over_keys = padding[:, None, None]
        assert to_attn_mask(None, over_keys).shape == (2, 1, 1, 5)
        assert to_attn_mask(torch.zeros_like(over_keys), over_keys).shape == (2, 1, 1, 5)
        assert to_attn_mask(torch.zeros(5, 5, device=padding.device), over_keys).shape == (2, 1, 5, 5)
        floating = torch.zeros(4, 1, 1, device=padding.device)
        assert to_attn_mask(floating, None) is floating

    def test_learned_bias_gets_a_gradient_in_its_own_shape(self, x, padding):
        module = MultiHeadAttention(16, 4).to(x.device)
        bias = torch.randn(1, 4, 5, 5, device=x.device, requires_grad=True)
        module(x, mask=bias, key_padding_mask=padding)[0].sum().backward()
        assert bias.grad.shape == bias.shape
        assert bias.grad.abs().sum() > 0


class TestCausal:
    @pytest.mark.parametrize("make", [lambda: SelfAttention(16), lambda: MultiHeadAttention(16, 4)])
    def test_is_the_triangular_mask(self, device, make):
        module, x = make().to(device), torch.randn(X, device=device)
        above = torch.ones(5, 5, dtype=torch.bool, device=device).triu(1)
        actual = module(x, is_causal=True, need_weights=True)
        assert_close(actual, module(x, mask=above, need_weights=True))

    def test_applies_together_with_masks(self, device):
        module, x = MultiHeadAttention(16, 4).to(device), torch.randn(X, device=device)
        above = torch.ones(5, 5, dtype=torch.bool, device=device).triu(1)
        padding = torch.arange(5, device=device).expand(2, 5) < 1
        actual = module(x, key_padding_mask=padding, is_causal=True, need_weights=True)
        assert_close(actual, module(x, mask=above, key_padding_mask=padding, need_weights=True))
        assert actual[1][:, :, 0].eq(0).all()  # the first row sees nothing


class TestMultiHeadAttention:
    def test_average_weights_is_the_mean_over_heads(self, device):
        module, x = MultiHeadAttention(16, 4).to(device), torch.randn(X, device=device)
        weights = module(x, need_weights=True)[1]
        average = module(x, need_weights=True, average_weights=True)[1]
        assert_close(average, weights.mean(1))
        assert module(x, average_weights=True)[1] is None

    def test_mask_of_three_dims_that_is_ambiguous_is_refused(self, device):
        module = MultiHeadAttention(16, 2).to(device)
        mask = torch.zeros(2, 5, 5, dtype=torch.bool, device=device)  # a mask a sequence, or one a head?
        with pytest.raises(ValueError, match=r"1 or batch \* heads = 4, got 2: pass \(batch, 1, Lq, Lk\)"):
            module(torch.randn(X, device=device), mask=mask)

    def test_shared_projection(self, device):
        module, x = MultiHeadAttention(16, 4, packed=False).to(device), torch.randn(X, device=device)
        module.key_proj = module.query_proj
        expected = oracle(module, x)
        assert_close(module(x, need_weights=True), expected)
        assert_close(torch.jit.script(module)(x, need_weights=True), expected)
        twin = copy.deepcopy(module)
        assert twin.key_proj is twin.query_proj

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"num_heads": 3}, r"num_heads must divide embed_dim, got embed_dim=16, num_heads=3"),
            (
                {"num_heads": 4, "num_kv_heads": 3},
                r"num_kv_heads must divide num_heads, got num_heads=4, num_kv_heads=3",
            ),
        ],
    )
    def test_bad_heads_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            MultiHeadAttention(16, **arguments)

    @pytest.mark.parametrize(
        ("module", "expected"),
        [
            (MultiHeadAttention(16, 4), "num_heads=4, head_dim=4, dropout=0.0"),
            (
                MultiHeadAttention(16, 4, num_kv_heads=2, value_dim=5, dropout=0.1),
                "num_heads=4, num_kv_heads=2, head_dim=4, value_dim=5, dropout=0.1",
            ),
            (SelfAttention(16, dropout=0.1), "dropout=0.1"),
            (CrossAttention(16), "dropout=0.0"),
            (ScaledDotProductAttention(0.2), "dropout=0.2"),
        ],
    )
    def test_readable_repr(self, module, expected):
        assert module.extra_repr() == expected
        assert expected in repr(module)


class TestFromTorch:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize(("kdim", "vdim"), [(None, None), (12, 10)])
    def test_gives_the_same_output_and_weights(self, device, bias, batch_first, kdim, vdim):
        theirs = nn.MultiheadAttention(16, 4, bias=bias, batch_first=batch_first, kdim=kdim, vdim=vdim).to(
            device
        )
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.3)  # biases too: they begin as zeros
        ours = MultiHeadAttention.from_torch(theirs)
        query = torch.randn(2, 5, 16, device=device)
        key = torch.randn(2, 7, kdim or 16, device=device)
        value = torch.randn(2, 7, vdim or 16, device=device)
        if not batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        padding = torch.arange(7, device=device) >= torch.tensor([[7], [4]], device=device)
        mask = torch.rand(8, 5, 7, device=device) < 0.3
        mask[..., 0] = False
        for options in ({}, {"key_padding_mask": padding}, {"mask": mask}, {"mask": mask[0]}):
            renamed = {"attn_mask" if name == "mask" else name: mask for name, mask in options.items()}
            expected = theirs(query, key, value, average_attn_weights=False, **renamed)
            assert_close(ours(query, key, value, need_weights=True, **options), expected)
            scripted = torch.jit.script(ours)
            assert_close(scripted(query, key, value, need_weights=True, **options), expected)

    def test_unbatched(self, device):
        theirs = nn.MultiheadAttention(16, 4).to(device)
        x = torch.randn(5, 16, device=device)
        assert_close(MultiHeadAttention.from_torch(theirs)(x)[0], theirs(x, x, x)[0])

    def test_copies_the_weights(self):
        theirs = nn.MultiheadAttention(16, 4)
        ours = MultiHeadAttention.from_torch(theirs)
        before = ours.in_proj_weight.clone()
        nn.init.zeros_(theirs.in_proj_weight)
        assert_close(ours.in_proj_weight, before)

    def test_takes_over_dtype_dropout_and_mode(self):
        theirs = nn.MultiheadAttention(16, 4, dropout=0.3, dtype=torch.float64).eval()
        ours = MultiHeadAttention.from_torch(theirs)
        assert ours.dropout == 0.3
        assert not ours.training
        assert {parameter.dtype for parameter in ours.parameters()} == {torch.float64}
        assert all(parameter.requires_grad for parameter in ours.parameters())

    @pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
    def test_refuses_what_has_no_counterpart(self, option):
        with pytest.raises(ValueError, match=f"{option}=True has no counterpart"):
            MultiHeadAttention.from_torch(nn.MultiheadAttention(16, 4, **{option: True}))

    @pytest.mark.parametrize("sizes", [{}, {"kdim": 8, "vdim": 9}])
    def test_what_is_frozen_stays_frozen(self, sizes):
        theirs = nn.MultiheadAttention(16, 4, **sizes)
        theirs.requires_grad_(False)
        theirs.in_proj_bias.requires_grad_(True)
        ours = dict(MultiHeadAttention.from_torch(theirs).named_parameters())
        assert {name for name, parameter in ours.items() if parameter.requires_grad} == (
            {"query_proj.bias", "key_proj.bias", "value_proj.bias"} if sizes else {"in_proj_bias"}
        )


OPTIONS = {
    "scale": {"scale": 0.0},
    "windows": {"window_left": 1, "window_right": 2},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": True},
    "everything": {"scale": 0.7, "window_left": 3, "window_right": 1, "softcap": 2.0, "sinks": True},
}


class TestScoreOptions:
    """What becomes of the scores: as in the functions."""

    @pytest.fixture(params=["scaled_dot_product", "self", "cross", "multi_head"])
    def case(self, request):
        make = {
            "scaled_dot_product": lambda **options: ScaledDotProductAttention(num_heads=4, **options),
            "self": lambda **options: SelfAttention(16, **options),
            "cross": lambda **options: CrossAttention(16, **options),
            "multi_head": lambda **options: MultiHeadAttention(16, 4, **options),
        }[request.param]
        return make, [torch.randn(shape) for shape in MODULES[request.param][1]]

    @staticmethod
    def make(case, options):
        make, inputs = case
        module = make(**options)
        if module.sinks is not None:
            nn.init.normal_(module.sinks)
        return module, inputs

    @staticmethod
    def expected(module, inputs, options):
        options = dict(options)
        if options.pop("sinks", False):
            one_head = module.sinks.size(0) == 1
            options["sinks"] = module.sinks.expand(inputs[0].size(0)) if one_head else module.sinks
        return oracle(module, *inputs, **options)

    @pytest.mark.parametrize("query_offset", [0, 2])
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_agree_with_the_functions(self, case, options, query_offset):
        module, inputs = self.make(case, options)
        expected = self.expected(module, inputs, {**options, "query_offset": query_offset})
        more = needs_weights(module) | {"query_offset": query_offset}
        assert_close(module(*inputs, **more), expected)
        assert_close(torch.jit.script(module)(*inputs, **more), expected)
        assert_close(module(*inputs, query_offset=query_offset)[0], expected[0])

    def test_change_the_output(self, case):
        plain, inputs = self.make(case, {})
        for options in OPTIONS.values():
            module = case[0](**options)
            module.load_state_dict(plain.state_dict(), strict=False)
            assert not torch.allclose(module(*inputs)[0], plain(*inputs)[0], atol=1e-4)

    def test_sinks_are_learned(self, case):
        module, inputs = self.make(case, {"sinks": True})
        assert "sinks" in module.state_dict()
        module(*inputs)[0].square().sum().backward()
        assert module.sinks.grad.shape == module.sinks.shape
        assert module.sinks.grad.abs().min() > 0
        assert "sinks" not in case[0]().state_dict()

    def test_sinks_begin_as_zeros_one_a_head(self):
        assert_close(MultiHeadAttention(16, 4, sinks=True).sinks.detach(), torch.zeros(4))
        with pytest.raises(ValueError, match="sinks=True needs num_heads"):
            ScaledDotProductAttention(sinks=True)

    def test_sinks_of_one_sequence(self):
        module = SelfAttention(16, sinks=True)
        nn.init.constant_(module.sinks, 0.5)
        x = torch.randn(2, 3, 5, 16)
        assert_close(module(x)[0][1, 2], module(x[1, 2])[0])

    def test_query_offset_moves_the_causal_triangle(self):
        module, x = MultiHeadAttention(16, 4), torch.randn(X)
        whole = module(x, is_causal=True)[0]
        assert_close(module(x[:, 3:], x, is_causal=True, query_offset=3)[0], whole[:, 3:])

    def test_compile_and_export(self, case):
        module, inputs = self.make(case, OPTIONS["everything"])
        torch.compiler.reset()
        assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(*inputs), module(*inputs))
        assert_close(torch.export.export(module, tuple(inputs)).module()(*inputs), module(*inputs))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"window_left": -1}, ValueError, "window_left must be at least 0, or None for no bound, got -1"),
            ({"window_right": 1.5}, TypeError, "window_right must be an int, got 1.5"),
            ({"softcap": -2.0}, ValueError, r"softcap must be at least 0 \(0 = none\), got -2.0"),
            ({"softcap": float("inf")}, ValueError, "softcap must be finite, got inf"),
            ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
            ({"scale": nn.Parameter(torch.ones(()))}, TypeError, "scale must be a number, got a tensor .*"),
            ({"windows": 3}, TypeError, "expected options among scale, window_left, .*, got windows"),
            ({"batch_first": 1}, TypeError, r"expected options .*, got batch_first \(inputs are .*\)"),
        ],
    )
    def test_bad_ones_are_refused(self, case, options, error, message):
        with pytest.raises(error, match=f"^{message}$"):
            case[0](**options)

    def test_are_shown(self, case):
        shown = case[0](**OPTIONS["everything"]).extra_repr()
        assert shown.endswith("scale=0.7, window_left=3, window_right=1, softcap=2.0, sinks=True")


class TestPackedProjection:
    def test_holds_the_weights_that_the_three_hold(self):
        packed, apart = (
            MultiHeadAttention(16, 4, num_kv_heads=2),
            MultiHeadAttention(16, 4, num_kv_heads=2, packed=False),
        )
        assert set(packed.state_dict()) == {
            *("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        }
        x = torch.randn(X)
        packed.load_state_dict(apart.state_dict())
        assert_close(packed(x), apart(x))
        nn.init.normal_(packed.in_proj_weight)
        nn.init.normal_(packed.in_proj_bias)
        apart.load_state_dict(packed.state_dict())
        assert_close(packed(x), apart(x))

    def test_loads_within_a_model(self):
        packed = nn.ModuleDict({"a": MultiHeadAttention(16, 4, bias=False)})
        apart = nn.ModuleDict({"a": MultiHeadAttention(16, 4, bias=False, packed=False)})
        state = apart.state_dict()
        assert not packed.load_state_dict(state).unexpected_keys
        assert "a.query_proj.weight" in state  # the caller's dict is left as it is
        assert_close(packed["a"].in_proj_weight[:16], apart["a"].query_proj.weight)

    def test_names_what_is_missing(self):
        state = MultiHeadAttention(16, 4, packed=False).state_dict()
        del state["key_proj.weight"]
        with pytest.raises(RuntimeError, match=r"in_proj_weight"):
            MultiHeadAttention(16, 4).load_state_dict(state)
        grouped = MultiHeadAttention(16, 4, num_kv_heads=2, packed=False)
        with pytest.raises(RuntimeError, match="size mismatch for in_proj_weight: expected 32 rows"):
            grouped.load_state_dict(nn.MultiheadAttention(16, 4).state_dict())

    def test_loads_the_state_of_torch_as_it_is(self):
        theirs, ours = nn.MultiheadAttention(16, 4, batch_first=True), MultiHeadAttention(16, 4)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(X)
        assert_close(ours(x)[0], theirs(x, x, x)[0])
        theirs.load_state_dict(ours.state_dict())

    def test_one_product_for_one_tensor(self):
        module, x, context = MultiHeadAttention(16, 4), torch.randn(X), torch.randn(2, 7, 16)
        for inputs, products in (([x], 2), ([x, context], 3), ([x, context, context + 1], 4)):
            program = torch.export.export(module, tuple(inputs))
            assert [str(node.target) for node in program.graph.nodes].count("aten.linear.default") == products

    def test_begins_as_three_linear_modules_do(self):
        packed = MultiHeadAttention(64, 4)
        apart = MultiHeadAttention(64, 4, packed=False)
        bound = 1 / 8
        for tensor in (packed.in_proj_weight, packed.in_proj_bias, apart.query_proj.weight):
            assert 0.9 * bound < tensor.abs().max() <= bound

    def test_with_other_features_is_refused(self):
        with pytest.raises(
            ValueError, match=r"packed=True needs inputs of embed_dim features, got \[16, 12, 16\]"
        ):
            MultiHeadAttention(16, 4, key_dim=12, packed=True)

    def test_vmap_over_an_ensemble(self):
        modules = [MultiHeadAttention(16, 4) for _ in range(3)]
        parameters, buffers = torch.func.stack_module_state(modules)
        x = torch.randn(X)

        def call(parameters, buffers):
            return torch.func.functional_call(modules[0], (parameters, buffers), (x,))[0]

        expected = torch.stack([module(x)[0] for module in modules])
        assert_close(torch.func.vmap(call)(parameters, buffers), expected)


def test_padding_of_other_columns_than_keys_is_refused():
    padding = torch.zeros(2, 1, dtype=torch.bool)
    x, context = torch.randn(2, 6, 16), torch.randn(2, 3, 16)
    for module in (SelfAttention(16), CrossAttention(16), MultiHeadAttention(16, 4)):
        inputs = [x] if isinstance(module, SelfAttention) else [x, context]
        keys = inputs[-1].shape[1]
        with pytest.raises(ValueError, match=rf"for each of the {keys} keys, got shape \[2, 1\]"):
            module(*inputs, key_padding_mask=padding)
        every = padding.expand(2, keys)
        assert_close(module(*inputs, key_padding_mask=every)[0], module(*inputs)[0])


def test_context_of_another_batch_is_refused():
    with pytest.raises(RuntimeError, match=r"one batch, but got shapes \[2, 6, 16\] and \[3, 9, 16\]"):
        CrossAttention(16)(torch.randn(2, 6, 16), torch.randn(3, 9, 16))


@pytest.mark.parametrize(
    "make", [SelfAttention, CrossAttention, lambda *a, **b: MultiHeadAttention(*a, 4, **b)]
)
def test_parameters_are_made_where_and_as_they_are_wanted(make):
    module = make(16, sinks=True, dtype=torch.float64, device="meta")
    assert {(p.dtype, p.device.type) for p in module.parameters()} == {(torch.float64, "meta")}
    torch.manual_seed(3)
    plain = make(16)
    torch.manual_seed(3)
    for a, b in zip(make(16, dtype=torch.float32).parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "make",
    [
        SelfAttention,
        CrossAttention,
        lambda *a, **b: MultiHeadAttention(*a, 4, **b),
        lambda *a, **b: MultiHeadAttention(*a, 4, packed=False, **b),
    ],
)
def test_parameters_begin_anew(make):
    """As the constructor begins them, also where there was no memory yet."""
    torch.manual_seed(3)
    expected = make(16, sinks=True, bias=True).state_dict()
    module = make(16, sinks=True, bias=True, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(3)
    module.reset_parameters()
    for name, parameter in module.state_dict().items():
        assert torch.equal(parameter, expected[name]), name
