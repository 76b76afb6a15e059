"""Cutting a traced graph: which stage has what, and which values travel."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fxpipe import SplitError, SplitPoint, pipe_split, pipeline
from fxpipe.graph.capture.capture import capture
from fxpipe.graph.capture.traced_graph import TracedGraph
from fxpipe.graph.cut.cut import Assignment, by_markers, cut
from fxpipe.graph.cut.flow import work_nodes
from tests.parity import assert_parity

X = torch.randn(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        y = self.layers[1](first)
        y = self.layers[2](y)
        return self.layers[3](y) + first


def assigned(*stages: int) -> Assignment:
    traced = capture(Net(), (X,))
    work = [node.name for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    return Assignment(dict(zip(work, stages, strict=True)))


def test_a_skip_goes_straight_to_the_stage_that_uses_it() -> None:
    traced = capture(Net(), (X,))

    stages = cut(traced, assigned(0, 1, 2, 2, 2))

    sent = [(s.port.name, s.target_stages) for s in stages[0].sent]
    assert sent == [("layers_0", (1, 2))]
    assert [(r.port.name, r.source_stage) for r in stages[2].received] == [
        ("layers_0", 0),
        ("layers_1", 1),
    ]
    assert stages[1].modules == ("layers.1",)


def test_a_value_used_twice_travels_once() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            pipe_split()
            return self.layers[1](x) + x * x

    pipe = pipeline(Twice(), (X,))

    assert [len(interface.received) for interface in pipe.interfaces] == [0, 1]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((0, 2, 2, 2, 2), "without holes"),
        ((1, 0, 0, 0, 1), r"values would have to go backwards:\n  layers_1 \(stage 0\) reads"),
    ],
)
def test_an_assignment_that_cannot_be_is_refused(stages: tuple[int, ...], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        cut(capture(Net(), (X,)), assigned(*stages))


def test_an_assignment_must_name_every_node() -> None:
    traced = capture(Net(), (X,))

    with pytest.raises(SplitError, match="leaves out layers_1, layers_2, layers_3, add"):
        cut(traced, Assignment({"layers_0": 0}))


class Early(Net):
    def forward(self, x: Tensor) -> Tensor:
        pipe_split()
        return super().forward(x)


class Late(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        pipe_split()
        return x


@pytest.mark.parametrize(("kind", "side"), [(Early, "before"), (Late, "after")])
def test_a_marker_that_makes_an_empty_stage_is_an_error_with_the_line(
    kind: type[Net], side: str
) -> None:
    with pytest.raises(SplitError, match=rf"test_cut\.py:\d+ .*nothing runs {side} it"):
        by_markers(capture(kind(), (X,)))


def test_markers_and_names_mean_the_same() -> None:
    class Marked(Net):
        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            y = self.layers[1](first)
            pipe_split()
            return self.layers[3](self.layers[2](y)) + first

    by_name = pipeline(Net(), (X,), split_spec={"layers.1": SplitPoint.END})

    marked = pipeline(Marked(), (X,))
    assert list(map(str, marked.interfaces)) == list(map(str, by_name.interfaces))


class LayerDrop(nn.Module):
    """Draws a number before each layer, and uses it for nothing at a rate of zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0.0:
                continue
            x = layer(x)
        return x


def draws_first(traced: TracedGraph) -> Assignment:
    """Two stages; what reads no other value goes to the first, as in a graph without order."""
    names = [node.name for node in work_nodes(traced) if node.op == "call_module"]
    late = set(names[len(names) // 2 :])
    return Assignment({node.name: int(node.name in late) for node in work_nodes(traced)})


def test_draws_keep_their_place_among_the_random_numbers() -> None:
    # All draws used to come first; the dropouts then got other numbers than in the plain model.
    model = LayerDrop()
    plain = copy.deepcopy(model)
    x = torch.randn(3, 4)

    pipe = pipeline(model, (x,), split_policy=draws_first)

    assert pipe.num_stages == 2
    assert_parity(plain, pipe, (x,))
