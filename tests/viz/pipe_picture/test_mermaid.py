from textwrap import dedent

from fxpipe.viz.pipe_picture.mermaid import _text, write_mermaid
from tests.viz.pipes import outline_of, shared_outline


def test_blocks_in_subgraphs():
    assert write_mermaid(outline_of("gpt", "blocks", 2)) == dedent("""\
        flowchart TD
          subgraph c0["stage 0, 53.4% of parameters, 31.6 k parameters"]
            s0p0["tokens<br/>Embedding · 2.05 k"]
            s0p1["positions<br/>Embedding · 4.1 k"]
            s0p2["drop<br/>Dropout"]
            s0p3["blocks.0<br/>Block · 12.7 k"]
            s0p4["blocks.1<br/>Block · 12.7 k"]
            s0p0 --> s0p2
            s0p1 --> s0p2
            s0p2 --> s0p3
            s0p3 --> s0p4
          end
          s0in0(["ids: int64[batch, sequence]"]) --> s0p0
          subgraph c1["stage 1, 46.6% of parameters, 27.5 k parameters"]
            s1p0["blocks.2<br/>Block · 12.7 k"]
            s1p1["blocks.3<br/>Block · 12.7 k"]
            s1p2["norm<br/>LayerNorm · 64"]
            s1p3["head<br/>Linear · 2.05 k"]
            s1p0 --> s1p1
            s1p1 --> s1p2
            s1p2 --> s1p3
          end
          s1p3 --> s1out0(["float32[batch, sequence, 64]"])
          s0p4 -->|"blocks.1<br/>float32[batch, sequence, 32] · 2.05 kB"| s1p0
          s0p0 -. "tied<br/>tokens.weight<br/>head.weight" .- s1p3
        """)


def test_stages_alone():
    text = write_mermaid(outline_of("unet", "stages"))

    assert (
        '  s1["stage 1, 32.6% of parameters<br/>17.6 k parameters<br/>'
        'down.1 … down.2: 2 × Down · 17.6 k"]'
    ) in text.splitlines()
    assert "subgraph" not in text


def test_skips_are_dotted():
    text = write_mermaid(outline_of("unet"))

    dotted = [line.split(" -.->")[0].strip() for line in text.splitlines() if "-.->" in line]
    assert dotted == ["s1p0", "s0p1"]


def test_shared_values_are_nodes():
    text = write_mermaid(shared_outline())

    assert text.count("to stages 1–7") == 2
    assert "  s0 -.-> v0" in text.splitlines()


def test_signs_of_the_language_are_spelled():
    assert _text('a "b" <c>') == "a #quot;b#quot; #lt;c#gt;"
