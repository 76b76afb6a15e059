import torch
from torch import nn

from fxpipe.graph.markers import SplitPoint, pipe_split
from fxpipe.graph.pipe import Pipe, pipeline


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Marked(Net):
    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index < 3:
                pipe_split()
        return x


def assert_same(pipe: Pipe, model: nn.Module, *args: torch.Tensor) -> None:
    want = model(*args)
    want.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    found = pipe(*args)
    found.sum().backward()

    torch.testing.assert_close(found, want)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def test_markers_make_stages():
    model, x = Marked(), torch.randn(3, 8)

    pipe = pipeline(model, (x,))

    assert pipe.num_stages == 4
    assert_same(pipe, model, torch.randn(5, 8))


def test_names_make_stages():
    model, x = Net(), torch.randn(3, 8)

    pipe = pipeline(model, (x,), split_spec={"layers.2": SplitPoint.BEGINNING})

    assert pipe.num_stages == 2
    assert list(pipe.get_stage_module(0).state_dict()) == [
        "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias",
    ]  # fmt: skip
    assert_same(pipe, model, torch.randn(5, 8))


def test_a_number_of_stages_is_balanced():
    model, x = Net(), torch.randn(3, 8)

    pipe = pipeline(model, (x,), num_stages=2)

    assert [len(stage.module.state_dict()) for stage in pipe.stages] == [4, 4]
    assert_same(pipe, model, torch.randn(5, 8))
