"""What is known about nodes is in the table of facts, and nowhere else."""

import copy
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxpipe.graph.capture.capture import capture
from fxpipe.graph.facts import Facts, NodeFacts, leaves_of, map_arguments, map_pairs
from fxpipe.graph.interface import TensorSpec
from fxpipe.graph.markers import pipe_split
from fxpipe.graph.pipe import pipeline

ROOT = Path(__file__).parents[2] / "fxpipe"


class Everything(nn.Module):
    """Buffers that change, views, nested values, autocast, checkpoint and a training flag."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        x = self.norm(self.first(x))
        with torch.no_grad():
            mask = torch.ones_like(x)
        mask[:, 0] = 0
        x = checkpoint(self.second, x * mask, use_reentrant=False)
        pipe_split()
        x = x.chunk(2, dim=1)[0] if self.training else x.split(2, dim=1)[0]
        return {"x": x.to(self.first.weight.dtype), "count": self.count + 0}


PACKAGES = ("graph", "planner", "runtime", "viz")
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_writes_on_the_nodes(path):
    assert ".meta" not in path.read_text().replace(".metadata", "")


def test_nodes_of_traced_and_stage_graphs_carry_nothing():
    model = Everything()
    pipe = pipeline(model, (torch.randn(3, 4),))
    traced = capture(model, (torch.randn(3, 4),))

    graphs = [traced.graph, *(stage.module.graph for stage in pipe.stages)]
    assert [dict(node.meta) for graph in graphs for node in graph.nodes if node.meta] == []


def test_a_copy_of_a_graph_has_the_same_facts():
    pipe = pipeline(Everything(), (torch.randn(3, 4),))
    stage = pipe.stages[0]
    copied = copy.deepcopy(stage.module)

    for ours, theirs in zip(stage.module.graph.nodes, copied.graph.nodes, strict=True):
        assert stage.facts[ours] is stage.facts[theirs]
    assert any(stage.facts.has_gradient(node) for node in copied.graph.nodes)


def test_nothing_is_known_about_a_node_without_an_entry():
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    facts = Facts()

    assert facts[node] == NodeFacts()
    facts.learn(node, spec=(TensorSpec((2,), torch.float32, True), 3))
    assert facts.has_gradient(node)
    assert [str(spec) for spec in facts.tensors(node)] == ["float32[2]"]


Pair = namedtuple("Pair", "left right")


def test_arguments_keep_their_structure():
    args = ([1, (2, slice(3, None, 4))], {"a": Pair(5, 6)})

    assert map_arguments(lambda leaf: leaf and leaf * 10, args) == (
        [10, (20, slice(30, None, 40))],
        {"a": Pair(50, 60)},
    )
    assert list(leaves_of(args)) == [1, 2, 3, None, 4, 5, 6]


def test_pairs_that_do_not_line_up_are_joined_whole():
    found = map_pairs(lambda a, b: (a, b), ([1, 2], {"k": (3,)}), ([1, 4], {"k": (3, 5)}))

    assert found == ([(1, 1), (2, 4)], {"k": ((3,), (3, 5))})
