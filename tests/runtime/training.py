"""Train a split model and the plain one side by side, all ranks in this process."""

import copy
import functools
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

import models
from fxpipe import LocalGroup, collect_aux_losses, get_schedule_class, pipeline
from fxpipe.microbatch import split_batch
from fxpipe.program.generators import SCHEDULES

__all__ = ["SCHEDULE_NAMES", "Pair", "assert_close", "ranks_for"]

SCHEDULE_NAMES = tuple(name for name in SCHEDULES if name != "ForwardOnly")


def ranks_for(schedule: str, num_stages: int) -> int:
    """One stage per rank where the schedule wants it, else two."""
    return num_stages if SCHEDULES[schedule].stages_per_rank[1] == 1 else num_stages // 2


def assert_close(found: Any, expected: Any, what: str, tolerance: float = 1e-6) -> None:
    """Equal structure, and every tensor equal within `tolerance` of its largest element."""
    found_leaves, found_spec = pytree.tree_flatten(found)
    leaves, spec = pytree.tree_flatten(expected)
    assert found_spec == spec, f"{what}: {found_spec} instead of {spec}"
    for a, b in zip(found_leaves, leaves, strict=True):
        if not isinstance(b, Tensor):
            assert a == b, f"{what}: {a!r} instead of {b!r}"
            continue
        assert isinstance(a, Tensor), f"{what}: {a!r} instead of a tensor"
        assert a.shape == b.shape, f"{what}: {list(a.shape)} instead of {list(b.shape)}"
        assert a.dtype == b.dtype, f"{what}: {a.dtype} instead of {b.dtype}"
        if not b.is_floating_point():
            assert torch.equal(a, b), f"{what}: values differ"
            continue
        scale = b.detach().abs().max().clamp(min=1e-3) if b.numel() else 1.0
        worst = ((a - b).detach().abs().max() / scale) if b.numel() else torch.zeros(())
        assert worst <= tolerance, f"{what}: relative difference {worst:.1e}"


class Pair:
    """A model of `models/` twice: split under a schedule, and plain.

    The plain model is run microbatch by microbatch, weighted by rows. For a model
    whose rows do not see each other that is the same as one pass over the batch.
    """

    def __init__(
        self, name: str, schedule: str, *, num_stages: int = 4, num_microbatches: int = 4
    ) -> None:
        self.module = models.load(name)
        self.num_microbatches = num_microbatches
        model, self.pipe, state = _traced(name, num_stages)
        model.load_state_dict(state)
        model.zero_grad()
        self.plain = copy.deepcopy(model)
        group = LocalGroup(ranks_for(schedule, num_stages))
        stages = [self.pipe.build_stage(i, torch.device("cpu"), group) for i in range(num_stages)]
        schedule_class = get_schedule_class(schedule)
        self.schedule = schedule_class(stages, num_microbatches, loss_fn=self.module.loss_fn)

    def check_step(self, rows: int, seed: int) -> None:
        """One step of both on the same batch; gradients pile up in both."""
        args, kwargs = self.module.example_inputs(rows, seed=seed, dtype=torch.float64)
        target = self.module.example_target(rows, seed=seed, dtype=torch.float64)
        losses: list[Tensor] = []

        output = self.schedule.step(*args, target=target, losses=losses, **kwargs)

        outputs, loss = self._plain_step(args, kwargs, target)
        assert len(losses) == self.num_microbatches
        assert_close(self.schedule.loss, loss, "loss")
        assert_close(output, _joined(outputs), "output")
        self.check_gradients()

    def check_eval(self, rows: int, seed: int) -> None:
        args, kwargs = self.module.example_inputs(rows, seed=seed, dtype=torch.float64)
        for model in (self.plain, *(stage.module for stage in self.pipe.stages)):
            model.eval()

        output = self.schedule.eval(*args, **kwargs)

        with torch.no_grad():
            expected = self.plain(*args, **kwargs)
        assert_close(output, expected, "output in eval mode")
        self.check_gradients()
        for model in (self.plain, *(stage.module for stage in self.pipe.stages)):
            model.train()

    def check_gradients(self) -> None:
        wanted = dict(self.plain.named_parameters(remove_duplicate=False))
        seen = set()
        for stage in self.pipe.stages:
            for name, parameter in stage.module.named_parameters(remove_duplicate=False):
                assert_close(parameter.grad, wanted[name].grad, f"{name}.grad")
                seen.add(name)
        assert seen == set(wanted)

    def check_values(self) -> None:
        """Parameters and buffers of both are equal."""
        wanted = self.plain.state_dict()
        for stage in self.pipe.stages:
            for name, value in stage.module.state_dict().items():
                assert_close(value, wanted[name], name)

    def parameters(self) -> list[torch.nn.Parameter]:
        found = [p for stage in self.pipe.stages for p in stage.module.parameters()]
        return list({id(p): p for p in found}.values())

    def _plain_step(self, args: Any, kwargs: Any, target: Tensor) -> tuple[list[Any], Tensor]:
        parts = split_batch(args, kwargs, self.num_microbatches, target=target)
        outputs, total = [], torch.zeros((), dtype=torch.float64)
        for part_args, part_kwargs, part in zip(
            parts.args, parts.kwargs, parts.target, strict=True
        ):
            with collect_aux_losses() as aux:
                output = self.plain(*part_args, **part_kwargs)
            share = len(part) / len(target)
            loss = self.module.loss_fn(output, part)
            ((loss + aux.total()) * share).backward()
            total = total + loss.detach() * share
            outputs.append(pytree.tree_map_only(Tensor, Tensor.detach, output))
        return outputs, total


@functools.cache
def _traced(name: str, num_stages: int) -> tuple[torch.nn.Module, Any, dict[str, Tensor]]:
    """A model, its Pipe and its first state; traced once, since some take seconds."""
    module = models.load(name)
    sizes = {} if module.SPLIT[num_stages] else {"stages": num_stages}
    model = module.build(seed=0, **sizes).double()
    args, kwargs = module.example_inputs(2, dtype=torch.float64)
    pipe = pipeline(model, args, kwargs, split_spec=models.split_spec(module, num_stages))
    assert pipe.num_stages == num_stages
    return model, pipe, copy.deepcopy(model.state_dict())


def _joined(outputs: list[Any]) -> Any:
    return pytree.tree_map(lambda *parts: torch.cat(parts), outputs[0], *outputs[1:])
