import re
import subprocess

import pytest

from fxpipe.viz.pipe_picture.dot import write_dot
from tests.viz.pipes import long_outline, outline_of, shared_outline


def skeleton(text):
    """Nodes and edges of DOT text, without looks."""
    lines = (line.strip() for line in text.splitlines())
    kept = [
        re.sub(r" \[.*", "", line)
        for line in lines
        if re.match(r"(s\d|subgraph|shared|\}|\{)", line)
    ]
    return "\n".join(kept)


def test_stages_are_clusters_with_their_parts():
    assert skeleton(write_dot(outline_of("unet", "blocks"))) == (
        "subgraph cluster_0 {\n"
        "s0head\n"
        "{ rank=same; s0head; s0p0 }\n"
        "s0p0\n"
        "s0p1\n"
        "s0p0 -> s0p1\n"
        "}\n"
        "s0in0\n"
        "s0in0 -> s0p0\n"
        "subgraph cluster_1 {\n"
        "s1head\n"
        "{ rank=same; s1head; s1p0 }\n"
        "s1p0\n"
        "s1p1\n"
        "s1p0 -> s1p1\n"
        "}\n"
        "subgraph cluster_2 {\n"
        "s2head\n"
        "{ rank=same; s2head; s2p0 }\n"
        "s2p0\n"
        "s2p1\n"
        "s2p0 -> s2p1\n"
        "}\n"
        "subgraph cluster_3 {\n"
        "s3head\n"
        "{ rank=same; s3head; s3p0 }\n"
        "s3p0\n"
        "s3p1\n"
        "s3p2\n"
        "s3p0 -> s3p1\n"
        "s3p1 -> s3p2\n"
        "}\n"
        "s3out0\n"
        "s3p2 -> s3out0\n"
        "s0p1 -> s1p0\n"
        "s1p1 -> s2p0\n"
        "s1p1 -> s2p1\n"
        "s2p1 -> s3p0\n"
        "s1p0 -> s3p0\n"
        "s0p1 -> s3p1\n"
        "}"
    )


def test_labels_have_name_shape_dtype_and_bytes():
    text = write_dot(outline_of("gpt", "stages"))

    assert (
        '  s0 -> s1 [label=<&#160;blocks.0<br align="left"/>'
        '&#160;float32[batch, sequence, 32] · 2.05 kB<br align="left"/>>]'
    ) in text.splitlines()


def test_skips_and_ties_are_drawn_apart():
    unet, gpt = write_dot(outline_of("unet")), write_dot(outline_of("gpt"))

    skips = [line for line in unet.splitlines() if "style=dashed" in line]
    assert [line.split(" [")[0].strip() for line in skips] == ["s1p0 -> s3p0", "s0p1 -> s3p1"]
    (tie,) = (line for line in gpt.splitlines() if "style=dotted" in line)
    assert tie.startswith("  s0p0 -> s3p2 [dir=none constraint=false")


def test_values_for_many_stages_are_a_note():
    text = write_dot(shared_outline())

    assert text.count("shape=note") == 1
    assert "to stages 1–7" in text


def test_long_chains_are_broken_into_columns():
    text = write_dot(long_outline("stages", 16))

    assert "{ rank=same; s0; s5; s10; s15 }" in text
    assert "  s4 -> s5 [label=" in text
    (edge,) = (line for line in text.splitlines() if line.startswith("  s4 -> s5 "))
    assert "constraint=false" in edge


def test_text_is_escaped():
    text = write_dot(outline_of("gpt"), title='a <b> & "c"')

    assert "label=<<b>a &lt;b&gt; &amp; &quot;c&quot;</b>>" in text


@pytest.mark.parametrize("depth", ["stages", "blocks", "nodes"])
@pytest.mark.parametrize("name", ["gpt", "unet", "encoder_decoder"])
def test_graphviz_accepts_it_silently(name, depth):
    text = write_dot(outline_of(name, depth), title=name)

    done = subprocess.run(
        ["dot", "-Tsvg"], input=text, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count('class="cluster"') == (0 if depth == "stages" else 4)
