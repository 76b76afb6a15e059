"""Find the rules by which an output size may follow from an input size.

In:  the values of some sizes, and of one output size, in a few runs.
Out: every rule that fits all runs, simplest first, and the run that tells most.

A rule is `factor * ((x + shift) // divisor) + offset`. Convolutions and poolings
have this form, and so have chains of them, ceilings, and enlarging by a whole
factor. All of it is arithmetic on ints: thousands of rules are tried, and only the
one that is left becomes a symbolic expression.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["SizeRule", "find_rules", "halving_size", "most_telling"]

_FACTORS = (1, 2, 4, 8, 16)
_LARGEST_DIVISOR = 512
_BETWEEN = 8


@dataclass(frozen=True, slots=True)
class SizeRule:
    """How a size follows from the size number `base`."""

    base: int
    factor: int = 1
    shift: int = 0
    divisor: int = 1
    offset: int = 0

    def at(self, size: int) -> int:
        """Return the output size for an input size."""
        return self.factor * ((size + self.shift) // self.divisor) + self.offset


def find_rules(bases: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[SizeRule]:
    """Return the rules that fit, simplest first.

    `bases[i]` has the values of an input size in all runs, `sizes` those of the
    output size. Of the shifts that fit, the ends, the simplest and some between are given.
    """
    found: list[SizeRule] = []
    for base, given in enumerate(bases):
        if len(set(given)) > 1:
            found += _linear(base, given, sizes)
            found += _divided(base, given, sizes)
    return sorted(found, key=_complexity)


def most_telling(
    candidates: Sequence[Sequence[SizeRule]], bases: Sequence[Sequence[int]], untried: Iterable[int]
) -> int | None:
    """Return the run, of those not tried, that is sure to exclude most; None if all agree.

    `candidates` has the rules of each output size, `bases[i][run]` an input size.
    """
    best, most = None, 0
    for run in untried:
        excluded = 0
        for rules in candidates:
            votes = Counter(rule.at(bases[rule.base][run]) for rule in rules)
            excluded += len(rules) - max(votes.values())
        if excluded > most:
            best, most = run, excluded
    return best


def halving_size(rules: Sequence[SizeRule], sizes: Iterable[tuple[int, int]]) -> int | None:
    """Return a size at which half of the shifts of the best rule give another value.

    `sizes` are pairs of a size to choose and the input size that follows from it.
    """
    best = rules[0]
    shifts = [r.shift for r in rules if replace(best, shift=r.shift) == r]
    middle = (min(shifts) + max(shifts) + 1) // 2
    if min(shifts) == max(shifts):
        return None
    return next((size for size, x in sizes if (x + middle) % best.divisor == 0), None)


def _complexity(rule: SizeRule) -> tuple[int, ...]:
    if rule.divisor == 1:
        return (0, rule.base)
    # Strides multiply to numbers such as 8 or 320 rather than 7 or 319.
    odd = rule.divisor // (rule.divisor & -rule.divisor)
    return (1, rule.factor, odd, rule.divisor, abs(rule.shift), rule.base)


def _linear(base: int, given: Sequence[int], sizes: Sequence[int]) -> Iterator[SizeRule]:
    first, second = next(
        (a, b) for a in range(len(given)) for b in range(a) if given[a] != given[b]
    )
    factor, rest = divmod(sizes[first] - sizes[second], given[first] - given[second])
    rule = SizeRule(base, factor, offset=sizes[first] - factor * given[first])
    if not rest and factor > 0 and all(map(_fits, [rule] * len(given), given, sizes)):
        yield rule


def _fits(rule: SizeRule, given: int, size: int) -> bool:
    return rule.at(given) == size


def _divided(base: int, given: Sequence[int], sizes: Sequence[int]) -> Iterator[SizeRule]:
    for factor in _FACTORS:
        if any(size % factor for size in sizes):
            continue
        parts = [size // factor for size in sizes]
        for divisor in _divisors(given, parts):
            # x + shift must be in [divisor * part, divisor * part + divisor - 1].
            lowest, highest = -(2**62), 2**62
            for x, part in zip(given, parts, strict=True):
                start = divisor * part - x
                lowest, highest = max(lowest, start), min(highest, start + divisor - 1)
                if lowest > highest:
                    break
            else:
                for shift in _shifts(lowest, highest):
                    yield SizeRule(base, factor, shift, divisor)


def _divisors(given: Sequence[int], parts: Sequence[int]) -> range:
    """Return the divisors that the smallest and the largest run allow."""
    low, high = given.index(min(given)), given.index(max(given))
    width, steps = given[high] - given[low], parts[high] - parts[low]
    first = max(2, width // (steps + 1)) if steps >= 0 else _LARGEST_DIVISOR + 1
    last = -(-width // (steps - 1)) if steps > 1 else _LARGEST_DIVISOR
    return range(first, min(last, _LARGEST_DIVISOR) + 1)


def _shifts(lowest: int, highest: int) -> set[int]:
    simplest = 0 if lowest <= 0 <= highest else min(lowest, highest, key=abs)
    between = range(lowest, highest, max(1, (highest - lowest) // _BETWEEN))
    return {*between, highest, simplest}
