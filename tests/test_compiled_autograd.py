"""Train steps under compiled autograd give the gradients of eager ones."""

import pytest
import torch
from torch import nn

import attn_ext

OPTIONS = {
    "plain": {},
    "dropout": {"dropout_p": 0.5},
    "band": {"is_causal": True, "window_left": 3, "query_offset": 1, "softcap": 2.0, "scale": 0.3},
}


class Model(nn.Module):
    """Attention with a learned bias and sinks, and a loss that reads the lse too."""

    def __init__(self, options: dict) -> None:
        super().__init__()
        self.options = options
        self.projection = nn.Linear(8, 3 * 8)
        self.bias = nn.Parameter(torch.randn(2, 5, 5))
        self.sinks = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.projection(x).view(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        output, lse = attn_ext.sdpa_with_lse(query, key, value, self.bias, sinks=self.sinks, **self.options)
        return output.square().sum() + lse.sin().sum()


def eager(loss: torch.Tensor) -> None:
    loss.backward()


def compiled(loss: torch.Tensor) -> None:
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()


def train(backward, options: dict, penalty: bool, steps: int = 2) -> list[torch.Tensor]:
    """Parameters after some steps; with a penalty on the gradient the backward goes through a backward."""
    torch.manual_seed(0)
    model = Model(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        x = torch.randn(3, 5, 8, requires_grad=True)
        loss = model(x)
        if penalty:
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + grad.square().sum()
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("penalty", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_train_steps_are_those_of_eager(options, penalty):
    torch._dynamo.reset()
    torch.testing.assert_close(train(compiled, options, penalty), train(eager, options, penalty))


def test_a_compiled_model_with_compiled_autograd():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model({"is_causal": True}), torch.randn(3, 5, 8)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: model(x).backward(), backend="aot_eager")()
    torch.testing.assert_close(tuple(p.grad for p in model.parameters()), expected)


def test_a_step_with_another_offset():
    """The offset may be a number of the graph or make a graph of its own: the gradient follows it."""
    torch._dynamo.reset()
    x = torch.randn(1, 4, 8)

    def gradient(backward, offset: int) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        backward(attn_ext.sdpa(leaf, leaf, leaf, is_causal=True, query_offset=offset).square().sum())
        return leaf.grad

    for offset in (0, 1, 2):
        torch.testing.assert_close(gradient(compiled, offset), gradient(eager, offset))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5, "is_causal": True}], ids=["plain", "dropout"])
def test_packed_sequences(options):
    torch._dynamo.reset()
    results = []
    for backward in (eager, compiled):
        torch.manual_seed(0)
        x, starts = torch.randn(9, 3, 2, 4, requires_grad=True), torch.tensor([0, 2, 2, 9])
        output, lse = attn_ext.sdpa_packed_with_lse(*x.unbind(1), starts, **options)
        backward(output.square().sum() + lse.sin().sum())
        results.append(x.grad)
    torch.testing.assert_close(*results)
