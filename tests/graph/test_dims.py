import pytest
import sympy

from fxpipe.errors import InputError, PipeliningShapeError
from fxpipe.graph.dims import evaluate, holds, plain, symbol, text

batch, sequence = symbol("batch"), symbol("sequence")
VALUES = {"batch": 5, "sequence": 7}


@pytest.mark.parametrize(
    ("expr", "written"),
    [
        (batch, "batch"),
        (2 * batch + 1, "2*batch + 1"),
        (5 - batch, "5 - batch"),
        (sympy.floor(batch / 2) * sequence - 3, "sequence*(batch//2) - 3"),
        (sympy.Mod(batch, 4), "(batch % 4)"),
        (sympy.ceiling((batch + 1) / sequence), "ceil_div(batch + 1, sequence)"),
        (sympy.Max(batch, 3), "max(3, batch)"),
        (3 * batch**2, "3*batch**2"),
        (sympy.Eq(batch, sequence), "batch == sequence"),
        (sympy.And(batch > 1, sympy.Ne(sequence, 3)), "(batch > 1) and (sequence != 3)"),
    ],
)
def test_sizes_are_written_as_python_and_evaluate_like_sympy(expr, written):
    assert text(expr) == written
    assert evaluate(expr, VALUES) == expr.subs({batch: 5, sequence: 7})


def test_whole_numbers_are_themselves():
    assert text(7) == "7"
    assert evaluate(7, {}) == 7


def test_missing_value_is_named():
    with pytest.raises(InputError, match=r"batch \+ sequence needs a value for sequence"):
        evaluate(batch + sequence, {"batch": 3})


def test_a_formula_that_divides_by_zero_is_refused_with_its_sizes():
    # The check of Qwen's and EXAONE's vision parts tried sizes below a divisor: a bare
    # ZeroDivisionError came out of `pipeline()`.
    size = sympy.Mod(sequence, sympy.floor(sequence / 4))

    with pytest.raises(PipeliningShapeError, match="no value for sequence = 3, since it divides"):
        evaluate(size, {"sequence": 3})
    assert holds(sympy.Eq(size, 0), {"sequence": 8})
    assert not holds(sympy.Eq(size, 0), {"sequence": 3})


def test_names_that_python_uses_are_fine():
    assert evaluate(symbol("max") + symbol("a.b"), {"max": 1, "a.b": 2}) == 3


def test_torch_functions_become_ordinary_sympy():
    from torch.utils._sympy.functions import FloorDiv

    s0 = sympy.Symbol("s0", integer=True, positive=True)

    assert plain(FloorDiv(s0 + 1, 2), {s0: batch}) == sympy.floor((batch + 1) / 2)
    assert plain(sympy.Integer(4)) == 4
