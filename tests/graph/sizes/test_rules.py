import random

import pytest

from fxpipe.graph.sizes.learn import _FAR, _MOST_RUNS, _STEPS, _TIMES
from fxpipe.graph.sizes.rules import SizeRule, find_rules, halving_size, most_telling


def fit(rule: SizeRule, given: list[int]) -> list[SizeRule]:
    return find_rules([given], [rule.at(size) for size in given])


@pytest.mark.parametrize(
    "rule",
    [
        SizeRule(0, 2),
        SizeRule(0, 3, offset=-4),
        SizeRule(0, divisor=8),
        SizeRule(0, shift=1, divisor=2),
        SizeRule(0, shift=-80, divisor=320),
        SizeRule(0, factor=4, shift=3, divisor=4),
    ],
)
def test_a_rule_is_found_among_those_that_fit(rule: SizeRule) -> None:
    given = [640, 1920, *range(641, 1920)]

    found = fit(rule, given)

    assert all(found[0].at(size) == rule.at(size) for size in range(600, 2000))
    assert all(other.at(x) == rule.at(x) for other in found for x in given)


def test_a_shift_that_is_not_pinned_down_has_its_candidates() -> None:
    # 16 -> 2 and 48 -> 6: with divisor 8, anything from 0 to 7 may be added before.
    found = find_rules([[16, 48]], [2, 6])

    shifts = {rule.shift for rule in found if rule.divisor == 8 and rule.factor == 1}
    assert shifts == set(range(8))


def test_the_simplest_rule_comes_first() -> None:
    assert find_rules([[16, 48], [5, 9]], [32, 96])[0] == SizeRule(0, 2)
    assert find_rules([[16, 48, 17]], [8, 24, 8])[0] == SizeRule(0, divisor=2)


def test_nothing_fits_a_size_that_shrinks_or_jumps() -> None:
    assert find_rules([[4, 8]], [8, 4]) == []
    assert find_rules([[4, 8, 9]], [4, 8, 500]) == []
    assert find_rules([[4, 4]], [1, 2]) == []


def test_the_most_telling_run_separates_the_rules() -> None:
    # This mistake was made: (x - 4)//6 fitted x//8 at 16, 48, 17, 18, 19 and 21.
    wrong, right = SizeRule(0, shift=-4, divisor=6), SizeRule(0, divisor=8)

    run = most_telling([[right, wrong]], [[17, 18, 40, 19]], range(4))

    assert run == 2
    assert most_telling([[right, wrong]], [[17, 18, 40, 19]], [0, 1, 3]) is None


def far(hint: int) -> range:
    return range(hint, hint + _FAR)


def learnt(right: SizeRule, hint: int) -> tuple[SizeRule, int]:
    """The rule that is left after the runs that `learn_sizes` would make."""
    pool = [hint + step for step in _STEPS] + [hint * times for times in _TIMES]
    given = [hint, 3 * hint]
    while True:
        rules = fit(right, given)
        run = most_telling([rules], [pool], range(len(pool)))
        size = pool[run] if run is not None else halving_size(rules, [(x, x) for x in far(hint)])
        if size is None or size in given:
            break
        given.append(size)
    return fit(right, given)[0], len(given) - 2


def test_a_few_telling_runs_leave_only_the_right_rule() -> None:
    chance = random.Random(0)
    for _ in range(200):
        right = SizeRule(0, shift=chance.randint(-8, 8), divisor=chance.randint(2, 16))
        hint = chance.randint(8, 64)

        found, runs = learnt(right, hint)

        assert runs <= _MOST_RUNS
        assert all(found.at(x) == right.at(x) for x in range(hint, 12 * hint)), (right, hint)


@pytest.mark.parametrize("hint", [1600, 2000, 16000])
def test_the_long_strides_of_audio_are_learnt(hint: int) -> None:
    right = SizeRule(0, shift=-80, divisor=320)

    found, runs = learnt(right, hint)

    assert found == right
    assert runs <= _MOST_RUNS
