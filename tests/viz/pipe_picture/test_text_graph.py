import re
from textwrap import dedent

import pytest

from fxpipe.viz.pipe_picture.text_graph import write_dot, write_mermaid
from tests.viz.pipes import outline_of, shared_outline


def test_blocks_in_subgraphs():
    assert write_mermaid(outline_of("gpt", "blocks", 2)) == dedent("""\
        flowchart TD
          subgraph c0["stage 0, 53.4% of parameters<br/>31.6 k parameters"]
            s0p0["tokens<br/>Embedding · 2.05 k"]
            s0p1["positions<br/>Embedding · 4.1 k"]
            s0p2["drop<br/>Dropout"]
            s0p3["blocks.0<br/>Block · 12.7 k"]
            s0p4["blocks.1<br/>Block · 12.7 k"]
          end
          subgraph c1["stage 1, 46.6% of parameters<br/>27.5 k parameters"]
            s1p0["blocks.2<br/>Block · 12.7 k"]
            s1p1["blocks.3<br/>Block · 12.7 k"]
            s1p2["norm<br/>LayerNorm · 64"]
            s1p3["head<br/>Linear · 2.05 k"]
          end
          s0in0(["ids: int64[batch, sequence]"])
          s1out0(["float32[batch, sequence, 64]"])
          s0in0 --> s0p0
          s0p0 --> s0p2
          s0p1 --> s0p2
          s0p2 --> s0p3
          s0p3 --> s0p4
          s1p0 --> s1p1
          s1p1 --> s1p2
          s1p2 --> s1p3
          s1p3 --> s1out0
          s0p4 -->|"blocks.1<br/>float32[batch, sequence, 32] · 2.05 kB"| s1p0
          s0p0 -.-|"tied<br/>tokens.weight<br/>head.weight"| s1p3
        """)


def edges(text, arrow):
    """The ends of edges, without looks."""
    pattern = rf"  (\w+) {arrow}(?:\|.*?\|)? (\w+)"
    return [match.groups() for line in text.splitlines() if (match := re.match(pattern, line))]


@pytest.mark.parametrize("depth", ["stages", "blocks", "nodes"])
@pytest.mark.parametrize("name", ["gpt", "unet", "encoder_decoder"])
def test_both_languages_have_the_same_nodes_and_edges(name, depth):
    outline = outline_of(name, depth)

    dot, mermaid = write_dot(outline, title=name), write_mermaid(outline)

    assert edges(dot, "->") == edges(mermaid, "(?:-->|-.->|-.-)")
    nodes = {end for pair in edges(dot, "->") for end in pair}
    for node in nodes:
        assert len(re.findall(rf"^ +{node} \[label=", dot, re.M)) == 1, node
        assert len(re.findall(rf"^ +{node}\(?\[", mermaid, re.M)) == 1, node
    assert dot.count("{") == dot.count("}") == (1 if depth == "stages" else 5)


def test_stages_alone():
    outline = outline_of("unet", "stages")

    assert (
        '  s1["stage 1, 32.6% of parameters<br/>17.6 k parameters<br/>'
        'down.1 … down.2: 2 × Down · 17.6 k"]'
    ) in write_mermaid(outline).splitlines()
    assert "subgraph" not in write_dot(outline)


def test_labels_have_name_shape_dtype_and_bytes():
    assert ('  s0 -> s1 [label="blocks.0\\nfloat32[batch, sequence, 32] · 2.05 kB"]') in write_dot(
        outline_of("gpt", "stages")
    ).splitlines()


def test_skips_and_ties_are_drawn_apart():
    unet, gpt = write_dot(outline_of("unet")), write_dot(outline_of("gpt"))

    skips = [line for line in unet.splitlines() if "style=dashed" in line]
    assert [line.split(" [")[0].strip() for line in skips] == ["s1p0 -> s3p0", "s0p1 -> s3p1"]
    (tie,) = (line for line in gpt.splitlines() if "style=dotted" in line)
    assert tie.startswith("  s0p0 -> s3p2 [")
    assert edges(write_mermaid(outline_of("unet")), "-.->") == [("s1p0", "s3p0"), ("s0p1", "s3p1")]


def test_values_for_many_stages_are_nodes():
    outline = shared_outline()

    assert write_mermaid(outline).count("to stages 1–7") == len(outline.shared)
    assert ("s0", "v0") in edges(write_dot(outline), "->")


def test_signs_of_the_languages_are_spelled():
    assert 'label="a <b> \\"c\\" \\\\d"' in write_dot(outline_of("gpt"), title='a <b> "c" \\d')
