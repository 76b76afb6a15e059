from fxpipe.program import Edges, Program, lower, simulate
from fxpipe.viz.timeline_picture.spans import edges_or_chain, find_dependencies


def named(timeline, edges=None):
    texts = [f"{span.rank}:{span.action}" for span in timeline.spans]
    found = find_dependencies(timeline.spans, edges)
    return {text: [texts[i] for i in sources] for text, sources in zip(texts, found, strict=True)}


PROGRAM = Program.parse("rank 0: 0F0 0B0\nrank 1: 1F0 1B0")


def test_compute_waits_for_the_compute_of_another_rank():
    assert named(simulate(PROGRAM)) == {
        "0:0F0": [],
        "1:1F0": ["0:0F0"],
        "1:1B0": ["1:1F0"],
        "0:0B0": ["1:1B0", "0:0F0"],
    }


def test_with_transfers_compute_waits_for_its_receive():
    assert named(simulate(lower(PROGRAM))) == {
        "0:0F0": [],
        "0:0SEND_F0": ["0:0F0"],
        "1:1RECV_F0": ["0:0SEND_F0"],
        "1:1F0": ["1:1RECV_F0"],
        "1:1B0": ["1:1F0"],
        "1:1SEND_B0": ["1:1B0"],
        "0:0RECV_B0": ["1:1SEND_B0"],
        "0:0B0": ["0:0RECV_B0", "0:0F0"],
    }


def test_skips_are_dependencies_too():
    program = Program.parse("rank 0: 0F0\nrank 1: 1F0\nrank 2: 2F0")
    edges = Edges.of(3, [(0, 1), (1, 2), (0, 2)])

    assert named(simulate(program, edges=edges), edges)["2:2F0"] == ["0:0F0", "1:1F0"]


def test_pair_waits_for_what_its_parts_read():
    program = Program.parse("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1")

    found = named(simulate(program))

    assert found["1:(1F1;1B0)OVERLAP_F_B"] == ["0:0F1", "1:1F0"]
    assert found["0:0B0"] == ["1:(1F1;1B0)OVERLAP_F_B", "0:0F0"]


def test_chain_covers_all_stages():
    spans = simulate(PROGRAM).spans

    assert edges_or_chain(spans, None) == Edges.chain(2)
    assert edges_or_chain((), None) == Edges.chain(1)
