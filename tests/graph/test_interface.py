from textwrap import dedent

import pytest
import torch

from fxpipe.errors import PipeliningShapeError
from fxpipe.graph.dims import symbol
from fxpipe.graph.interface import (
    Port,
    Received,
    Sent,
    StageInterface,
    TensorSpec,
    Tied,
    check_interfaces,
    edges_of,
)

batch = symbol("batch")
HIDDEN = Port("hidden", TensorSpec((batch, 4, 8), torch.float32, True))
MASK = Port("mask", TensorSpec((batch, 4), torch.bool))


def two_stages(sent: Port, received: Port) -> list[StageInterface]:
    return [
        StageInterface(0, (), ("x",), (Sent(sent, (1,)),), ()),
        StageInterface(1, (Received(received, 0),), (), (), ()),
    ]


def test_spec_prints_and_binds():
    assert str(HIDDEN.spec) == "float32[batch, 4, 8]"
    assert str(HIDDEN.spec.bind({"batch": 2})) == "float32[2, 4, 8]"
    assert HIDDEN.spec.symbols == {"batch"}


def test_spec_of_a_tensor():
    spec = TensorSpec.of(torch.zeros(2, 3, requires_grad=True))

    assert spec == TensorSpec((2, 3), torch.float32, True)


def test_integers_have_no_gradient():
    with pytest.raises(ValueError, match="int64 tensor cannot require a gradient"):
        TensorSpec((1,), torch.int64, True)


def test_fitting_interfaces_pass():
    check_interfaces(two_stages(HIDDEN, HIDDEN))


def test_every_misfit_is_listed():
    wrong_shape = Port("hidden", TensorSpec((batch, 5, 8), torch.float32, True))
    wrong_dtype = Port("mask", TensorSpec((batch, 4), torch.int64))
    interfaces = [
        StageInterface(0, (), ("x",), (Sent(HIDDEN, (1,)), Sent(MASK, (1, 2))), ()),
        StageInterface(1, (Received(wrong_shape, 0), Received(wrong_dtype, 0)), (), (), ()),
        StageInterface(2, (Received(Port("late", MASK.spec), 1),), (), (), ()),
    ]

    with pytest.raises(PipeliningShapeError) as caught:
        check_interfaces(interfaces)

    assert str(caught.value) == dedent("""\
        4 tensors do not fit between stages:
          stage 0 -> 2, 'mask': sent bool[batch, 4], expected nothing of this name
          stage 0 -> 1, 'hidden': sent float32[batch, 4, 8], expected float32[batch, 5, 8]
          stage 0 -> 1, 'mask': sent bool[batch, 4], expected int64[batch, 4]
          stage 1 -> 2, 'late': expected bool[batch, 4], sent nothing""")


def test_equal_sizes_may_be_written_differently():
    other = Port("hidden", TensorSpec((2 * batch - batch, 4, 8), torch.float32, True))

    check_interfaces(two_stages(HIDDEN, other))


def test_edges_join_the_ports_between_two_stages():
    interfaces = [
        StageInterface(0, (), ("x",), (Sent(HIDDEN, (1,)), Sent(MASK, (1, 2))), ()),
        StageInterface(1, (Received(HIDDEN, 0), Received(MASK, 0)), (), (), ()),
        StageInterface(2, (Received(MASK, 0),), (), (), ()),
    ]

    edges = edges_of(interfaces)

    assert [(e.source, e.target, len(e.ports), e.has_gradient) for e in edges] == [
        (0, 1, 2, True),
        (0, 2, 1, False),
    ]


def test_interface_prints_what_it_reads_and_writes():
    assert str(two_stages(HIDDEN, HIDDEN)[0]) == dedent("""\
        stage 0
          reads    model input x
          sends    hidden: float32[batch, 4, 8] to stage 1""")


def test_a_tie_has_two_ends():
    with pytest.raises(ValueError, match="at least two"):
        Tied(((0, "weight"),))
