"""Run the benchmarks one after the other: `python -m benchmarks [name ...]`.

Each stands beside torch.distributed.pipelining in the same run and prints ratios;
absolute times depend on the machine and mean little.
"""

import subprocess
import sys

ALL = (
    "tracing",
    "program_scaling",
    "split_backward",
    "step_overhead",
    "step_memory",
    "auto_split",
    "plan_accuracy",
    "house",
)


def main() -> int:
    names = sys.argv[1:] or ALL
    unknown = sorted(set(names) - set(ALL))
    if unknown:
        print(f"unknown benchmarks {unknown}; there are {', '.join(ALL)}", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
