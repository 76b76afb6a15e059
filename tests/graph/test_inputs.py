"""The model's inputs by name, and whether a later call fits the traced one."""

import pytest
import sympy
import torch
from torch import Tensor, nn

from fxpipe import InputError, PipeliningShapeError, pipe_split, pipeline
from fxpipe.graph.dims import symbol
from fxpipe.graph.inputs import InputSignature, name_call, parameters_of, path_text
from fxpipe.graph.interface import TensorSpec


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None) -> Tensor:
        x = self.a(x) * scale
        pipe_split()
        return self.b(x if mask is None else x * mask)


class Anything(Net):
    def forward(self, x: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        return self.b(x + sum(more)) + named["shift"]


X = torch.randn(4, 8)


def test_arguments_get_the_names_of_the_forward() -> None:
    parameters = parameters_of(Net())

    assert name_call(parameters, (1, 2), {"mask": 3}) == {"x": 1, "scale": 2, "mask": 3}
    assert name_call(parameters, (1,), {}) == {"x": 1}
    assert name_call(parameters, (), {"mask": 3}, partial=True) == {"mask": 3}


def test_every_misfit_of_a_call_is_listed() -> None:
    with pytest.raises(InputError) as caught:
        name_call(parameters_of(Net()), (1, 2, 3), {"scale": 4, "masks": 5})

    message = str(caught.value)
    assert "3 positional inputs given, at most 2 taken" in message
    assert "'scale' is given twice" in message
    assert "'masks' is not an input of the model" in message
    assert "forward takes (x, scale, mask)" in message
    with pytest.raises(InputError, match="missing: 'x'"):
        name_call(parameters_of(Net()), (), {})


def test_extra_arguments_are_inputs_too() -> None:
    model = Anything()
    args, kwargs = (X, X, X), {"shift": torch.ones(4, 8)}

    pipe = pipeline(model, args, kwargs)

    assert pipe.info().input_names == ("x", "more", "shift")
    torch.testing.assert_close(pipe(*args, **kwargs), model(*args, **kwargs))


def test_all_that_differs_from_the_traced_call_is_listed() -> None:
    pipe = pipeline(Net(), (X, 2.0), {"mask": torch.ones(4, 1)})

    with pytest.raises(PipeliningShapeError) as caught:
        pipe(torch.randn(3, 9), 3.0, mask=torch.ones(2, 1))

    message = str(caught.value)
    assert "x: expected float32[batch, 8], got float32[3, 9] (dimension 1)" in message
    assert "scale: traced with 2.0, got 3.0" in message
    assert (
        "mask: expected float32[batch, 1], got float32[2, 1], but batch is 3 elsewhere" in message
    )


def test_an_input_that_comes_or_goes_is_an_error() -> None:
    with_mask = pipeline(Net(), (X,), {"mask": torch.ones(4, 1)})
    without = pipeline(Net(), (X,))

    with pytest.raises(PipeliningShapeError, match="mask: not given, but the traced call had it"):
        with_mask(X)
    with pytest.raises(PipeliningShapeError, match="mask: given, but the traced call left it out"):
        without(X, mask=torch.ones(4, 1))
    without(X, 1.0, mask=None)  # the defaults, written out


def test_the_kind_of_a_dtype_must_stay_but_not_its_precision() -> None:
    pipe = pipeline(Net(), (X,))

    assert pipe.bind_inputs((X.double(),)) == {"batch": 4}
    with pytest.raises(PipeliningShapeError, match=r"got int64\[4, 8\]"):
        pipe.bind_inputs((X.long(),))
    with pytest.raises(PipeliningShapeError, match="got 3"):
        pipe.bind_inputs((3,))


def test_paths_read_like_code() -> None:
    assert path_text((("item", "batch"), ("item", "ids"), ("item", 0))) == "batch['ids'][0]"
    assert path_text((("item", "mask"), ("attr", "kv"))) == "mask.kv"


def test_sizes_for_which_a_condition_means_nothing_are_refused() -> None:
    # `n % (n//4)` divides by zero for small n; the check of Qwen's vision part tried one row.
    signature = InputSignature(
        parameters_of(nn.Linear(1, 1)),
        {"input": TensorSpec((symbol("n"),), torch.float32)},
        (sympy.Eq(symbol("n") % (symbol("n") // 4), 0),),
        (),
    )

    signature.bind({"input": torch.zeros(8)})
    with pytest.raises(PipeliningShapeError, match="got n = 2"):
        signature.bind({"input": torch.zeros(2)})
