"""Generate tokens with a pipeline: the plain model's tokens, from many sequences at once.

    tokens = generate(schedule, input_ids, max_new_tokens=20)     # on every rank

Sequences are the rows of a batch, split into the schedule's microbatches: while one stage works on
some sequences, the others work on others. Each stage keeps the keys and values of its own
attention layers, one cache per microbatch; they never travel. What travels is the hidden state of
the newest tokens, and the tokens themselves, which the rank of the last stage chooses.

Caches are used where they can be: attention modules that take `past_key_values` (Hugging Face), and
a model traced with `position_ids` among its inputs. Any other model is given the whole sequence
again for each token, with the same result.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.microbatch import Microbatches
from fxpipe.program import Action
from fxpipe.runtime.parameters.tied import plain_name
from fxpipe.runtime.stage.stage_kind import TracedFront
from fxpipe.schedules import Schedule
from fxpipe.stage import PipelineStage
from fxpipe.training.pipeline import Pipeline, evaluation

__all__ = ["generate"]


def generate(
    pipe: Pipeline | Schedule,
    input_ids: torch.Tensor | Sequence[torch.Tensor],
    *,
    max_new_tokens: int,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    eos_token_id: int | None = None,
    input_name: str = "input_ids",
) -> list[torch.Tensor]:
    """The prompts with the tokens that follow. Call it on every rank, with the same prompts.

    Args:
        input_ids: prompts of one length as a tensor of rows, or a list of prompts of any length,
            as many as the schedule has microbatches.
        do_sample: draw from the most likely `top_k` tokens (default: all) at a `temperature`, with
            torch's generator on the rank of the last stage; otherwise take the most likely one.
        eos_token_id: a sequence ends here; all end when each has.
        input_name: what the model calls its tokens.

    Returns:
        one tensor per sequence, on every rank.
    """
    schedule = pipe.schedule if isinstance(pipe, Pipeline) else pipe
    if max_new_tokens < 1 or temperature <= 0:
        raise InputError(
            f"max_new_tokens must be at least 1 and temperature above 0, got {max_new_tokens} "
            f"and {temperature}"
        )
    parts = _microbatches(input_ids, schedule.n_microbatches)
    begins = [part.shape[1] for part in parts for _ in part]
    state = _State(schedule)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        if not do_sample:
            return logits.argmax(-1)
        scores = logits.float() / temperature
        if top_k is not None:
            least = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        return torch.multinomial(scores.softmax(-1), 1).squeeze(1)

    try:
        with evaluation(schedule.stages):
            _extend(schedule, parts, state, choose, max_new_tokens, eos_token_id, input_name)
    finally:
        state.remove()
    rows = [row for part in parts for row in part]
    return [_ended(row, begin, eos_token_id) for row, begin in zip(rows, begins, strict=True)]


def _extend(
    schedule: Schedule,
    parts: list[torch.Tensor],
    state: _State,
    choose: Callable[[torch.Tensor], torch.Tensor],
    count: int,
    eos: int | None,
    input_name: str,
) -> None:
    """Put up to `count` tokens after each row, in place of the parts."""
    rows = [part.shape[0] for part in parts]
    ended = torch.zeros(sum(rows), dtype=torch.bool)
    for number in range(count):
        first = parts if number == 0 or not state.caches else [part[:, -1:] for part in parts]
        calls: list[Any] = []
        for part, new in zip(parts, first, strict=True):
            kwargs = {input_name: new}
            if state.takes_positions:
                begin, end = part.shape[1] - new.shape[1], part.shape[1]
                kwargs["position_ids"] = torch.arange(begin, end).expand(new.shape)
            calls.append(((), kwargs))
        schedule.eval(Microbatches(calls, rows=rows), return_outputs=False)
        state.check([part.shape[1] for part in parts])
        chosen = None
        if state.logits:
            chosen = choose(torch.cat([state.logits[m] for m in range(len(parts))])).cpu()
        tokens = schedule.share("generate", chosen)
        if eos is not None:
            tokens = tokens.masked_fill(ended, eos)
            ended |= tokens == eos
        parts[:] = [
            torch.cat([part, new[:, None].to(part)], 1)
            for part, new in zip(parts, tokens.split(rows), strict=True)
        ]
        if eos is not None and bool(ended.all()):
            return


class _State:
    """What the stages of this process keep between tokens: caches, and the last logits."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._microbatch = 0
        self._layers = {stage.stage_index: _cached_layers(stage) for stage in schedule.stages}
        self.takes_positions = _takes_positions(schedule.stages)
        self.caches: dict[int, Any] = {}
        self.logits: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []
        if self.takes_positions and self._agree_on_caches():
            from transformers import DynamicCache

            self.caches = {m: DynamicCache() for m in range(schedule.n_microbatches)}
            for layers in self._layers.values():
                for layer in layers.values():
                    hook = layer.register_forward_pre_hook(self._give_cache, with_kwargs=True)
                    self._handles.append(hook)
        for stage in schedule.stages:
            if stage.is_last:
                self._handles.append(stage.submod.register_forward_hook(self._keep_logits))
        schedule.before("F", self._begin)

    def remove(self) -> None:
        self._schedule.remove_hook("F", self._begin)
        for handle in self._handles:
            handle.remove()

    def _agree_on_caches(self) -> bool:
        """Whether any rank has layers with caches.

        Raises:
            InputError: on all ranks: some layers have one, and others were cut into.
        """
        front = self._schedule.stages[0].front
        assert isinstance(front, TracedFront)
        kinds = {_kind(path) for layers in self._layers.values() for path in layers}
        cut = [path for path in sorted(front.info.opened) if _kind(path) in kinds]
        problem = self._schedule.share("generate", cut[0] if cut else None, default=None)
        if problem is not None:
            raise InputError(
                f"a cut falls into {problem!r}, which then has no cache of keys and values: cut "
                "between layers, or trace without position_ids to generate without caches"
            )
        return bool(self._schedule.share("generate", True if kinds else None, default=False))

    def _begin(self, action: Action) -> None:
        assert action.microbatch is not None
        self._microbatch = action.microbatch

    def _give_cache(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "past_key_values": self.caches[self._microbatch]}

    def _keep_logits(self, module: nn.Module, args: Any, output: Any) -> None:
        found = getattr(output, "logits", output)
        found = found[0] if isinstance(found, tuple | list) else found
        self.logits[self._microbatch] = found[:, -1].detach()

    def check(self, lengths: Sequence[int]) -> None:
        """Compare what the caches hold with the tokens that there are."""
        for m, cache in self.caches.items():
            for layers in self._layers.values():
                for path, layer in layers.items():
                    held = cache.get_seq_length(layer.layer_idx)
                    assert held == lengths[m], f"{path} has cached {held} of {lengths[m]} tokens"


def _cached_layers(stage: PipelineStage) -> dict[str, Any]:
    """The attention modules of a stage that write keys and values to a cache, by path."""
    return {
        path: module
        for path, module in stage.submod.named_modules()
        if hasattr(module, "layer_idx")
        and "past_key_values" in inspect.signature(module.forward).parameters
        and not any(hasattr(child, "layer_idx") for child in list(module.modules())[1:])
    }


def _kind(path: str) -> str:
    """The path without the number of the layer: all layers of a kind have the same."""
    return re.sub(r"\d+", "#", plain_name(path))


def _takes_positions(stages: Sequence[PipelineStage]) -> bool:
    """Whether the model was traced with positions as an input: the same on all ranks."""
    front = stages[0].front
    return isinstance(front, TracedFront) and "position_ids" in front.info.input_names


def _microbatches(
    input_ids: torch.Tensor | Sequence[torch.Tensor], count: int
) -> list[torch.Tensor]:
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() != 2 or len(input_ids) < count:
            raise InputError(
                f"prompts must be rows of tokens, at least one for each of the {count} "
                f"microbatches, got {list(input_ids.shape)}"
            )
        return list(torch.tensor_split(input_ids, count))
    if len(input_ids) != count:
        raise InputError(
            f"prompts of different lengths must be as many as the {count} microbatches, "
            f"got {len(input_ids)}"
        )
    return [prompt.reshape(1, -1) for prompt in input_ids]


def _ended(row: torch.Tensor, begin: int, eos: int | None) -> torch.Tensor:
    """A sequence without what follows its first end token."""
    if eos is None:
        return row
    ends = (row[begin:] == eos).nonzero()
    return row[: begin + int(ends[0]) + 1] if len(ends) else row
