"""Sizes as sympy expressions of a few named symbols, with one text form.

A dimension is an `int` or a `sympy.Expr` over symbols made by `symbol`, such as
`batch` or `2*sequence + 1`. A condition is a sympy relational over the same
symbols. The text form is Python: `text` writes it for people, and `evaluate` computes it.

torch's symbolic shapes use their own sympy functions (FloorDiv, Mod, ...);
`plain` turns those into ordinary sympy, and everything after capture sees only
ordinary sympy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import sympy

from fxpipe.errors import InputError, PipeliningShapeError

__all__ = ["Dim", "evaluate", "free_names", "holds", "plain", "solve", "symbol", "text"]

Dim: TypeAlias = int | sympy.Expr


def symbol(name: str) -> sympy.Symbol:
    """Return the symbol for a size; the same name always gives an equal symbol."""
    return sympy.Symbol(name, integer=True, positive=True)


def free_names(dim: Dim | sympy.Basic) -> set[str]:
    """Return the names of the symbols that a size or condition depends on."""
    return set() if isinstance(dim, int) else {s.name for s in dim.free_symbols}


def evaluate(dim: Dim | sympy.Basic, values: Mapping[str, int]) -> Any:
    """Return the value of a size or condition, given its symbols' values.

    Raises:
        InputError: a symbol has no value.
        PipeliningShapeError: the formula divides by zero there: `n % (n//4)` for 3.
    """
    if isinstance(dim, int):
        return dim
    if isinstance(dim, sympy.Symbol) and dim.name in values:
        return values[dim.name]
    names, code = _compiled(dim)
    missing = [name for name in names if name not in values]
    if missing:
        raise InputError(
            f"the size {text(dim)} needs a value for {', '.join(missing)}; "
            f"given: {', '.join(sorted(values)) or 'none'}"
        )
    try:
        return code(*(values[name] for name in names))
    except ZeroDivisionError:
        given = ", ".join(f"{name} = {values[name]}" for name in names)
        raise PipeliningShapeError(
            f"the size {text(dim)} has no value for {given}, since it divides by zero; "
            "give inputs for which the model itself runs, or trace it with inputs of this size"
        ) from None


def holds(condition: sympy.Basic, values: Mapping[str, int]) -> bool:
    """Say whether a condition holds; not where it divides by zero."""
    try:
        return bool(evaluate(condition, values))
    except PipeliningShapeError:
        return False


def solve(dim: sympy.Expr, name: str, value: int) -> int | None:
    """Return the whole number for a symbol that gives a size like `2*batch + 1` its value.

    None if there is none, or if the size is not of that form.
    """
    unknown = symbol(name)
    slope = dim.coeff(unknown, 1)
    rest = sympy.expand(dim - slope * unknown)
    if free_names(slope) or free_names(rest) or slope == 0:
        return None
    found, remainder = divmod(value - int(rest), int(slope))
    return None if remainder else found


@functools.lru_cache(maxsize=4096)
def _compiled(dim: sympy.Basic) -> tuple[tuple[str, ...], Callable[..., Any]]:
    names = tuple(sorted(free_names(dim)))
    scope = {"__builtins__": {}, "max": max, "min": min, "ceil_div": _ceil_div}
    source = f"lambda {', '.join(_safe(name) for name in names)}: {_write(dim, _safe)}"
    code: Callable[..., object] = eval(source, scope)
    return names, code


def _safe(name: str) -> str:
    # A symbol may carry any input's name, also one like "max" or "batch.0".
    return "s_" + "".join(c if c.isalnum() else f"_{ord(c)}_" for c in name)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def text(dim: Dim | sympy.Basic) -> str:
    """Write a size or condition as Python, for example `batch*(sequence//2 + 1)`."""
    return str(dim) if isinstance(dim, int) else _write(dim, str)


_RELATIONS: dict[type[sympy.Basic], str] = {
    sympy.Equality: "==",
    sympy.Unequality: "!=",
    sympy.StrictLessThan: "<",
    sympy.LessThan: "<=",
    sympy.StrictGreaterThan: ">",
    sympy.GreaterThan: ">=",
}


def _write(expr: sympy.Basic, name: Callable[[str], str]) -> str:
    if isinstance(expr, sympy.Symbol):
        return name(expr.name)
    if isinstance(expr, sympy.Float):
        return repr(float(expr))  # all digits: sympy writes fifteen
    if isinstance(expr, sympy.Integer) or expr in (sympy.true, sympy.false):
        return str(expr)
    if isinstance(expr, sympy.Add):
        first, *rest = expr.as_ordered_terms()
        signs = [" - " if term.could_extract_minus_sign() else " + " for term in rest]
        terms = [
            sign + _write(-term if sign == " - " else term, name)
            for sign, term in zip(signs, rest, strict=True)
        ]
        return _write(first, name) + "".join(terms)
    if isinstance(expr, (sympy.Mul, sympy.Rational)):
        if expr.could_extract_minus_sign():
            return f"-{_group(-expr, name)}"
        numerator, denominator = expr.as_numer_denom()
        if denominator != 1:
            return f"{_group(numerator, name)}/{_group(denominator, name)}"
        return "*".join(_group(factor, name) for factor in expr.as_ordered_factors())
    if isinstance(expr, sympy.Pow):
        return f"{_group(expr.base, name)}**{_group(expr.exp, name)}"
    if isinstance(expr, sympy.floor):
        numerator, denominator = sympy.fraction(sympy.together(expr.args[0]))
        return f"({_group(numerator, name)}//{_group(denominator, name)})"
    if isinstance(expr, sympy.ceiling):
        numerator, denominator = sympy.fraction(sympy.together(expr.args[0]))
        return f"ceil_div({_write(numerator, name)}, {_write(denominator, name)})"
    if isinstance(expr, sympy.Mod):
        return f"({_group(expr.args[0], name)} % {_group(expr.args[1], name)})"
    if isinstance(expr, (sympy.Max, sympy.Min)):
        word = "max" if isinstance(expr, sympy.Max) else "min"
        return f"{word}({', '.join(_write(arg, name) for arg in expr.args)})"
    if type(expr) in _RELATIONS:
        left, right = expr.args
        return f"{_write(left, name)} {_RELATIONS[type(expr)]} {_write(right, name)}"
    if isinstance(expr, (sympy.And, sympy.Or)):
        word = " and " if isinstance(expr, sympy.And) else " or "
        return word.join(sorted(f"({_write(arg, name)})" for arg in expr.args))
    if isinstance(expr, sympy.Not):
        return f"not ({_write(expr.args[0], name)})"
    raise InputError(f"a size uses {type(expr).__name__}, which has no text form: {expr}")


def _group(expr: sympy.Basic, name: Callable[[str], str]) -> str:
    written = _write(expr, name)
    simple = expr.is_Symbol or (expr.is_Integer and expr >= 0) or expr.is_Function or expr.is_Pow
    return written if simple else f"({written})"


def plain(expr: sympy.Basic, names: Mapping[object, sympy.Expr] | None = None) -> sympy.Basic:
    """Rewrite an expression of torch's symbolic shapes in ordinary sympy.

    `names` maps torch's symbols to ours; whole numbers come back as `int`.
    """
    if isinstance(expr, (bool, int, float)):
        return expr
    result = _plain(expr, names or {})
    return int(result) if isinstance(result, sympy.Integer) else result


# By class name: torch moves and subclasses these between versions.
_TORCH_FUNCTIONS: dict[str, Callable[..., object]] = {
    "FloorDiv": lambda a, b: sympy.floor(a / b),
    "CleanDiv": lambda a, b: sympy.floor(a / b),
    "CeilDiv": lambda a, b: sympy.ceiling(a / b),
    "Mod": sympy.Mod,
    "PythonMod": sympy.Mod,
    "ModularIndexing": lambda a, b, c: sympy.Mod(sympy.floor(a / b), c),
    "Max": sympy.Max,
    "Min": sympy.Min,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "ToFloat": lambda a: a,
    "TruncToInt": sympy.floor,
    "FloorToInt": sympy.floor,
    "CeilToInt": sympy.ceiling,
    "PowByNatural": operator.pow,
    "FloatPow": operator.pow,
    "LShift": lambda a, b: a * 2**b,
    "RShift": lambda a, b: sympy.floor(a / 2**b),
    "Identity": lambda a: a,
}


def _plain(expr: sympy.Basic, names: Mapping[object, sympy.Expr]) -> sympy.Basic:
    if isinstance(expr, sympy.Symbol):
        return names.get(expr, expr)
    if not expr.args:
        return expr
    args = [_plain(arg, names) for arg in expr.args]
    rebuild = _TORCH_FUNCTIONS.get(type(expr).__name__, expr.func)
    return rebuild(*args)
