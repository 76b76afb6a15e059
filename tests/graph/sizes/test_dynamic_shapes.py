"""What users ask of input sizes, and what they are told about them."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection

from fxpipe import InputError, PipeliningShapeError, TraceError, pipe_split, pipeline


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.a(x))
        pipe_split()
        return self.b(x if mask is None else x * mask)


class FixesLength(Pair):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.a(x)
        pipe_split()
        return self.b(x).view(-1, 6, 8)  # the length is written down


class Nested(Pair):
    def forward(self, batch: dict[str, tuple[Tensor, Tensor]], scale: float = 1.0) -> Tensor:
        x, y = batch["xy"]
        x = self.a(x) * scale
        pipe_split()
        return self.b(x) + y


X = torch.randn(4, 6, 8)
MASK = torch.ones(4, 6, 1)


def dims(pipe: object) -> list[str]:
    return [str(size) for size in pipe.info().input_sizes]  # type: ignore[attr-defined]


def assert_takes(pipe: object, *shapes: tuple[int, ...]) -> None:
    model = Pair()
    for shape in shapes:
        x = torch.randn(shape)
        torch.testing.assert_close(pipe(x), model(x))  # type: ignore[operator]


def assert_refuses(pipe: object, *shapes: tuple[int, ...]) -> None:
    for shape in shapes:
        with pytest.raises(PipeliningShapeError):
            pipe(torch.randn(shape))  # type: ignore[operator]


BATCH = Dim("batch", min=2, max=8)


@pytest.mark.parametrize(
    "wish",
    [
        "batch",
        {"batch": 0},
        {"x": {0: Dim("batch")}},
        {"x": {-3: Dim.DYNAMIC}},
        {"x": (Dim.AUTO, Dim.STATIC, 8)},
        {"x": [Dim("batch"), None, None]},
        {"x": {0: "batch", 1: 6}},
        ({0: Dim("batch")},),
        [{0: Dim("batch")}],
    ],
    ids=str,
)
def test_every_form_opens_the_batch_and_nothing_else(wish: object) -> None:
    pipe = pipeline(Pair(), (X,), dynamic_shapes=wish)

    assert pipe.info().symbols == ("batch",)
    assert_takes(pipe, (4, 6, 8), (3, 6, 8), (1, 6, 8))
    assert_refuses(pipe, (4, 5, 8), (4, 6, 4))


def test_a_collection_of_shapes_by_tensor() -> None:
    shapes = ShapesCollection()
    shapes[X] = {0: Dim("rows")}

    pipe = pipeline(Pair(), (X,), dynamic_shapes=shapes)

    assert pipe.info().symbols == ("rows",)


def test_several_names_at_once() -> None:
    pipe = pipeline(Pair(), (X,), {"mask": MASK}, dynamic_shapes={"batch": 0, "sequence": 1})

    assert pipe.info().symbols == ("batch", "sequence")
    x, mask = torch.randn(2, 9, 8), torch.ones(2, 9, 1)
    torch.testing.assert_close(pipe(x, mask=mask), Pair()(x, mask))


def test_a_nested_input_takes_a_nested_wish() -> None:
    example = {"xy": (torch.randn(4, 8), torch.randn(4, 8))}
    wish = {"batch": {"xy": ({0: Dim("rows")}, {0: Dim("rows")})}, "scale": None}

    pipe = pipeline(Nested(), (example, 2.0), dynamic_shapes=wish)

    assert pipe.bind_inputs(({"xy": (torch.randn(7, 8), torch.randn(7, 8))}, 2.0), {}) == {
        "rows": 7
    }


def test_bounds_of_a_dim_are_checked() -> None:
    pipe = pipeline(Pair(), (X,), dynamic_shapes={"x": {0: BATCH}})

    assert_takes(pipe, (2, 6, 8), (8, 6, 8))
    with pytest.raises(PipeliningShapeError, match="batch <= 8; got batch = 9"):
        pipe(torch.randn(9, 6, 8))
    with pytest.raises(PipeliningShapeError, match="batch >= 2; got batch = 1"):
        pipe(torch.randn(1, 6, 8))


def test_one_dim_in_two_places_must_be_equal() -> None:
    rows = Dim("rows")
    wish = {"x": {0: rows, 1: Dim("length")}, "mask": {0: rows, 1: Dim("length")}}
    pipe = pipeline(Pair(), (X, MASK), dynamic_shapes=wish)

    with pytest.raises(PipeliningShapeError, match=r"mask.*but rows is 4 elsewhere"):
        pipe(torch.randn(4, 6, 8), torch.ones(1, 6, 1))


def test_a_size_that_follows_from_another() -> None:
    class Halves(Pair):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.a(x)
            pipe_split()
            return self.b(x).repeat(2, 1)[1:] + y

    half = Dim("half")
    x, y = torch.randn(4, 8), torch.randn(7, 8)
    pipe = pipeline(Halves(), (x, y), dynamic_shapes={"x": {0: half}, "y": {0: 2 * half - 1}})

    x, y = torch.randn(3, 8), torch.randn(5, 8)
    torch.testing.assert_close(pipe(x, y), Halves()(x, y))
    with pytest.raises(PipeliningShapeError, match=r"expected 2\*half - 1 = 5, got 6"):
        pipe(x, torch.randn(6, 8))


def test_a_size_given_only_by_its_double_is_found() -> None:
    pipe = pipeline(Pair(), (X,), dynamic_shapes={"x": {0: 2 * Dim("half")}})

    assert pipe.bind_inputs((torch.randn(10, 6, 8),)) == {"half": 5}
    with pytest.raises(PipeliningShapeError, match=r"expected 2\*half, got 5"):
        pipe.bind_inputs((torch.randn(5, 6, 8),))


def test_what_the_model_fixes_is_an_error_with_the_line() -> None:
    model = FixesLength()
    before = dict(model.__dict__)

    with pytest.raises(TraceError) as caught:
        pipeline(model, (X,), dynamic_shapes={"batch": 0, "sequence": 1})

    message = str(caught.value)
    assert "x dimension 1 (sequence) is always 6" in message
    assert re.search(r"test_dynamic_shapes\.py:\d+: return self\.b\(x\)\.view\(-1, 6, 8\)", message)
    assert "x dimension 0" not in message
    assert model.__dict__ == before


def test_what_is_left_to_the_model_may_be_fixed() -> None:
    wish = {"x": {0: Dim.DYNAMIC, 1: Dim.AUTO, 2: Dim.STATIC}}

    pipe = pipeline(FixesLength(), (X,), dynamic_shapes=wish)

    found = dims(pipe)
    assert found[0] == "x dimension 0: batch (dynamic)"
    assert found[1].startswith("x dimension 1: 6 (static: the model fixes it at ")
    assert found[1].endswith("return self.b(x).view(-1, 6, 8)  # the length is written down)")
    assert found[2] == "x dimension 2: 8 (static: asked for by dynamic_shapes)"


def test_dims_that_the_model_needs_equal_must_have_one_name() -> None:
    wish = {"x": {0: Dim("a")}, "mask": {0: Dim("b")}}

    with pytest.raises(TraceError, match=r"is always .: the model fixes it at .*x \* mask"):
        pipeline(Pair(), (X, MASK), dynamic_shapes=wish)


def test_without_wishes_the_reasons_are_given() -> None:
    pipe = pipeline(FixesLength(), (X,))

    found = dims(pipe)
    assert found[0] == "x dimension 0: batch (dynamic)"
    assert "x dimension 1: 6 (static: the model fixes it at" in found[1]
    assert "x dimension 2: 8 (static: " in found[2]


def test_an_example_of_one_row_opens_the_batch() -> None:
    pipe = pipeline(Pair(), (torch.randn(1, 6, 8),), dynamic_shapes="batch")

    assert_takes(pipe, (1, 6, 8), (5, 6, 8))


def test_a_single_row_next_to_others_is_broadcast() -> None:
    pipe = pipeline(Pair(), (X, torch.ones(1, 6, 1)), dynamic_shapes="batch")

    assert "mask dimension 0: 1 (static: a size of 1 next to others" in "\n".join(dims(pipe))
    x, mask = torch.randn(2, 6, 8), torch.ones(1, 6, 1)
    torch.testing.assert_close(pipe(x, mask), Pair()(x, mask))


def test_all_misfits_are_reported_together() -> None:
    wish = {
        "xx": {0: Dim("rows")},
        "x": {0: Dim("a", min=8), 1: 7, 5: Dim("b"), 2: 0.5},
        "mask": {0: Dim("b"), 1: Dim("b")},
        "depth": 9,
    }

    with pytest.raises(InputError) as caught:
        pipeline(Pair(), (X, MASK), dynamic_shapes=wish)

    assert str(caught.value).splitlines() == [
        "dynamic_shapes does not fit the example inputs:",
        "  'xx' is not among the inputs (x, mask); closest: 'x'",
        "  x dimension 1 is 6, not 7, in the example",
        "  x has 3 dimensions, no dimension 5",
        "  x dimension 2 needs a Dim, a name, an int or None; found 0.5",
        "  no tensor input has a dimension 9 to be called 'depth'",
        "  b is 4 at mask dimension 0 and 6 at mask dimension 1; give them Dims of different "
        "names, or leave one out",
        "  a is 4 at x dimension 0; its Dim wants at least 8",
        "give 'batch', {'batch': 0}, or what torch.export takes: {argument: {dimension: Dim(...)}}",
    ]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("rows", "found 'rows'; needed 'batch'"),
        ((None, None, None), r"3 entries for 2 inputs \(x, mask\)"),
        ({"x": Dim("rows")}, "x needs {dimension: Dim}"),
        ({"x": (Dim("rows"),)}, "x has 3 dimensions; found 1 entries"),
        ({"x": {0: Dim("r", min=2)}, "mask": {0: Dim("r")}}, "'r' have different bounds"),
        ({"x": {0: 3 * Dim("third")}}, "x dimension 0 is 4 in the example, not 3.third"),
        ({"batch": 0, "x": {0: Dim("rows")}}, "x dimension 0 is called both batch and rows"),
    ],
)
def test_a_wish_that_does_not_fit_is_named(wish: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipeline(Pair(), (X, MASK), dynamic_shapes=wish)


def test_a_constant_input_has_no_dimensions() -> None:
    example = ({"xy": (torch.randn(4, 8), torch.randn(4, 8))}, 2.0)

    with pytest.raises(InputError, match=r"scale is the constant 2\.0"):
        pipeline(Nested(), example, dynamic_shapes={"scale": {0: Dim("rows")}})
    with pytest.raises(InputError, match=r"batch\['xy'\] has the parts 0, 1; found"):
        pipeline(Nested(), example, dynamic_shapes={"batch": {"xy": {0: None, 2: None}}})
