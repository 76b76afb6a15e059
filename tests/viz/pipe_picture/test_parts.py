import torch
from torch import fx, nn

from fxpipe.graph.facts import Facts
from fxpipe.graph.markers import SplitPoint
from fxpipe.graph.pipe import Stage, pipeline
from fxpipe.viz.pipe_picture.parts import find_parts
from tests.viz.pipes import pipe_of


def parts_of(stage: Stage, shortest_run: int | None):
    return find_parts(stage.module, stage.facts, {}, shortest_run=shortest_run)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) + x


class Deep(nn.Module):
    """Eight blocks, a last one that is called twice, and one more kind between."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.again = Block()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 5:
                x = self.norm(x)
        return self.again(self.again(self.again(x)))


def whole(model, shortest, granularity="module"):
    pipe = pipeline(model, (torch.zeros(2, 4),), granularity=granularity)
    return parts_of(pipe.stages[0], shortest_run=shortest)


def test_modules_are_parts_in_order_of_execution():
    parts = parts_of(pipe_of("gpt").stages[0], shortest_run=3).parts

    assert [(part.title, part.kind_text, part.parameters, part.reads) for part in parts] == [
        ("tokens", "Embedding", 2048, ()),
        ("positions", "Embedding", 4096, ()),
        ("drop", "Dropout", 0, (0, 1)),
        ("blocks.0", "Block", 12704, (2,)),
    ]


def test_runs_of_alike_modules_are_one_part():
    parts = whole(Deep(), 3).parts

    assert [(part.title, part.kind_text, part.parameters, part.reads) for part in parts] == [
        ("blocks.0 … blocks.5", "6 × Block", 120, ()),
        ("norm", "LayerNorm", 8, (0,)),
        ("blocks.6", "Block", 20, (1,)),
        ("blocks.7", "Block", 20, (2,)),
        ("again, 3 times", "3 × Block", 20, (3,)),
    ]


def test_shorter_runs_are_joined_on_request():
    assert [part.title for part in whole(Deep(), 2).parts] == [
        "blocks.0 … blocks.5",
        "norm",
        "blocks.6 … blocks.7",
        "again, 3 times",
    ]


def test_operations_of_an_opened_module_are_one_part():
    parts = whole(Deep(), 3, granularity="op").parts

    assert parts[0].title == "blocks.0 … blocks.5"
    assert [part.kind for part in parts] == ["operations"] * 5
    assert parts[0].parameters == 120


def test_every_node_is_a_part_on_request():
    parts = parts_of(pipe_of("gpt").stages[0], shortest_run=None).parts

    assert [part.title for part in parts] == [
        "arange",
        "tokens",
        "positions",
        "add",
        "drop",
        "blocks.0",
    ]
    assert parts[3].reads == (1, 2)
    assert parts[3].note == "float32[batch, sequence, 32]"


def test_operations_are_named_as_people_write_them_with_sizes_that_are_known():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, mask):
            x = self.linear(x) * mask[:, None, ..., 1:]
            x += 1
            return x

    inputs = (torch.ones(2, 1, 4), torch.ones(2, 5))
    pipe = pipeline(Net(), inputs, num_stages=1)
    stage, sizes = pipe.stages[0], pipe.bind_inputs(inputs, {})

    parts = find_parts(stage.module, stage.facts, sizes, shortest_run=None).parts

    assert [part.title for part in parts] == ["linear", "mask[:, None, ..., 1:]", "mul", "add"]
    assert parts[0].note == "Linear · float32[2, 1, 4] · 20"


def test_values_are_followed_through_code():
    found = parts_of(pipe_of("unet").stages[1], shortest_run=3)

    assert found.source_of("down_1_1") == 0
    assert found.source_of("down_2_0") == 1
    assert found.readers_of("down_0_0") == (0,)
    assert found.readers_of("nothing") == ()


def test_value_of_code_alone_has_no_source():
    found = parts_of(pipe_of("encoder_decoder").stages[0], shortest_run=3)

    assert found.source_of("getitem") is None
    assert found.readers_of("source_mask") == (1,)


def test_parameter_is_found_in_its_part():
    found = parts_of(pipe_of("gpt").stages[3], shortest_run=3)

    assert found.holder_of("head.weight") == 2
    assert found.holder_of("header.weight") is None


def test_module_under_settings_is_a_part():
    class Quiet(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                x = self.first(x)
            return self.second(x)

    pipe = pipeline(Quiet(), (torch.zeros(2, 4),), split_spec={"second": SplitPoint.BEGINNING})

    parts = parts_of(pipe.stages[0], shortest_run=3).parts

    assert [(part.title, part.kind) for part in parts] == [("first", "Linear")]


def test_plain_fx_module_has_parts():
    module = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))

    assert [part.title for part in find_parts(module, Facts(), {}, shortest_run=3).parts] == [
        "0",
        "1",
    ]
