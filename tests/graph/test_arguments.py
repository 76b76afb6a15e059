from collections import namedtuple

from fxpipe.graph.arguments import leaves_of, map_arguments, map_pairs

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
