"""What one started process runs: `python -m fxpipe.cli.ranks.rank JOB SETTINGS`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from fxpipe import logs
from fxpipe.cli.ranks.launch import record_failure

__all__ = ["main"]


def main(job: str, settings: str) -> None:
    """Run one job on this rank; what goes wrong is written down for the starter."""
    try:
        logs.configure(os.environ.get(logs.VARIABLE, ""))
        _jobs()[job](settings)
    except BaseException as error:
        if not record_failure(error):
            raise
        raise SystemExit(1) from None


def _jobs() -> dict[str, Callable[[str], None]]:
    from fxpipe.cli.demo import run_demo_rank
    from fxpipe.cli.doctor import run_check_rank
    from fxpipe.cli.train import run_train_rank

    return {"train": run_train_rank, "demo": run_demo_rank, "check": run_check_rank}


if __name__ == "__main__":
    main(*sys.argv[1:])
