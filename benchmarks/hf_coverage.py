"""Measure which Hugging Face architectures split, and with the right gradients.

    python -m benchmarks.hf_coverage                     every model type, 2 and 4 stages
    python -m benchmarks.hf_coverage llama t5 --stages 2
    python -m benchmarks.hf_coverage --split auto --jobs 2 --log out/coverage.jsonl
    python -m benchmarks.hf_coverage --page docs/coverage.md

Each architecture has a tiny random configuration; nothing is downloaded.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.coverage import Collection, measure


def _names() -> Sequence[str]:
    from tests.graph.hf.registry import all_cases

    return list(all_cases())


def _case(name: str, variant: str) -> Any:
    from tests.graph.hf.registry import case

    return case(name, variant)


if __name__ == "__main__":
    measure(
        Collection("benchmarks.hf_coverage", _names, _case, ("transformers",)),
        "Measure which Hugging Face architectures split, and with the right gradients.",
    )
