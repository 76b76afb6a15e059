"""One rank of Accelerate's pipelined inference: `pippy_rank.py PACKAGE`; torchrun starts it.

With "fxpipe" as PACKAGE `fxpipe.compat.install()` comes first; Accelerate's code is as it is.
"""

import sys

import torch
import torch.distributed as dist


def main(package: str) -> None:
    torch.set_num_threads(1)
    if package == "fxpipe":
        import fxpipe.compat

        fxpipe.compat.install()
    from accelerate import PartialState
    from accelerate.inference import prepare_pippy
    from torch import nn

    state = PartialState(cpu=True)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks).eval()
    x = torch.randn(4, 8)
    plain = model(x)
    model = prepare_pippy(model, split_points=["2"], example_args=(x[:2],), num_chunks=2)
    with torch.no_grad():
        output = model(x)
    sys.stdout.write(f"CLASS {type(model.pippy_stage).__module__}\n")
    if state.is_last_process:
        torch.testing.assert_close(output, plain)
        sys.stdout.write(f"OUTPUT {output.sum().item():.8f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
