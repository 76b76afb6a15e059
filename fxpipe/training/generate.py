"""Generate tokens with a pipeline: the plain model's tokens, from many sequences at once.

    tokens = generate(schedule, input_ids, max_new_tokens=20)     # on every rank

Sequences are the rows of a batch, split into the schedule's microbatches: while one stage works on
some sequences, the others work on others. The prompts go through the stages first; then all
microbatches go round (`fxpipe.schedules.rounds`), up to `ROUNDS` tokens in one call. With at least
as many microbatches as ranks no rank waits for a token. Each stage keeps the keys and values of its
own attention layers, one cache per microbatch; they never travel. What travels is the hidden state
of the newest tokens, and the tokens themselves, which the rank of the last stage chooses.

Caches are used where they can be: attention modules that take `past_key_values` (Hugging Face), and
a model traced with `position_ids` among its inputs. Any other model is given the whole sequence
again for each token, with the same result. Hand-written stages, DTensors at boundaries and
schedules with hooks of the user's make one token per call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.microbatch import Microbatches
from fxpipe.program import Action
from fxpipe.runtime.parameters.tied import plain_name
from fxpipe.runtime.stage.stage_kind import TracedFront
from fxpipe.schedules import Schedule
from fxpipe.schedules.rounds import can_go_round, has_hooks, rounds_of
from fxpipe.stage import PipelineStage
from fxpipe.training.pipeline import Pipeline, evaluation

__all__ = ["ROUNDS", "generate"]

ROUNDS = 32
"""Tokens of a sequence in one call. Then all ranks learn the tokens, and whether all rows ended."""


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
    rows = sum(len(part) for part in parts)
    choice = _Choice(rows, do_sample, temperature, top_k, eos_token_id)
    with evaluation(schedule.stages):
        _Sequences(schedule, parts, choice, input_name).extend(max_new_tokens)
    found = [row for part in parts for row in part]
    return [_ended(row, begin, eos_token_id) for row, begin in zip(found, begins, strict=True)]


@dataclass(frozen=True, slots=True)
class _Choice:
    """How tokens are chosen."""

    rows: int
    do_sample: bool
    temperature: float
    top_k: int | None
    eos: int | None

    def noise(self, logits: torch.Tensor) -> torch.Tensor | None:
        """For all rows of a batch at once, as the plain model draws."""
        if not self.do_sample:
            return None
        size = (self.rows, logits.shape[-1])
        return torch.empty(size, device=logits.device).exponential_()

    def tokens(self, logits: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """One for each row. The draw is that of torch.multinomial, with the noise made before."""
        if noise is None:
            return logits.argmax(-1)
        scores = logits.float() / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        likely = scores.softmax(-1)
        if likely.isnan().any():
            raise InputError("the model's logits are not finite: there is nothing to draw from")
        return (likely / noise).argmax(-1)


class _Sequences:
    """The sequences of all microbatches, and what the stages of this process keep of them."""

    def __init__(
        self, schedule: Schedule, parts: list[torch.Tensor], choice: _Choice, input_name: str
    ) -> None:
        self.input_name = input_name
        self._schedule, self._parts, self._choice = schedule, parts, choice
        self._rows = [part.shape[0] for part in parts]
        self._layers = {stage.stage_index: _cached_layers(stage) for stage in schedule.stages}
        self._names = [input_name, *["position_ids"] * _takes_positions(schedule.stages)]
        self._is_begun = False
        self._microbatch: int | None = None  # while its forward runs: shapes are found without it
        self._caches: list[Any] = []
        if len(self._names) > 1 and self._agree_on_caches():
            from transformers import DynamicCache

            self._caches = [DynamicCache() for _ in parts]
        self._came: list[list[torch.Tensor]] = [[] for _ in parts]  # in this call, to this rank
        self._tokens: list[list[torch.Tensor]] = [[] for _ in parts]  # chosen here, in all calls
        self._has_ended = [torch.zeros(n, dtype=torch.bool) for n in self._rows]
        self._noise: dict[int, tuple[torch.Tensor | None, int]] = {}

    def extend(self, count: int) -> None:
        """Put up to `count` tokens after each row, in place of the parts."""
        schedule, eos = self._schedule, self._choice.eos
        begins = [part.shape[1] for part in self._parts]
        is_hooked = has_hooks(schedule)
        handles = self._hook_modules()
        self._follow(schedule)
        try:
            self._call(schedule, 1)
            is_kept = None if can_go_round(schedule) and not is_hooked else True
            goes_round = not schedule.share("generate", is_kept, default=False)
            rounds: dict[int, Schedule] = {}
            made = 1
            while made < count:
                pairs = zip(self._parts, begins, strict=True)
                if eos is not None and all((p[:, at:] == eos).any(1).all() for p, at in pairs):
                    return
                number = min(ROUNDS, count - made) if goes_round else 1
                if goes_round and number not in rounds:
                    rounds[number] = rounds_of(schedule, number, self)
                    self._follow(rounds[number])
                self._call(rounds.get(number, schedule), number)
                made += number
        finally:
            schedule.remove_hook("F", self._begin)
            schedule.remove_hook("F", self._end)
            for handle in handles:
                handle.remove()

    def _follow(self, schedule: Schedule) -> None:
        schedule.before("F", self._begin)
        schedule.after("F", self._end)

    def _begin(self, action: Action) -> None:
        self._microbatch = action.microbatch

    def _end(self, action: Action) -> None:
        self._microbatch = None

    def _call(self, schedule: Schedule, count: int) -> None:
        """Put `count` tokens after each row."""
        calls: list[Any] = []
        for m, part in enumerate(self._parts):
            new = part[:, -1:] if self._caches and self._is_begun else part
            self._came[m] = [new]
            is_round = schedule is not self._schedule
            calls.append(((), {self.input_name: new} if is_round else self.inputs(m, 0, new)))
        schedule.eval(Microbatches(calls, rows=self._rows), return_outputs=False)
        self._is_begun = True
        mine = [torch.stack(some[-count:], 1) for some in self._tokens if some]
        tokens = schedule.share("generate", torch.cat(mine).cpu() if mine else None)
        self._parts[:] = [
            torch.cat([part, new.to(part)], 1)
            for part, new in zip(self._parts, tokens.split(self._rows), strict=True)
        ]
        self._check_caches()

    # What goes into a round, and what comes out of it

    def shapes(self, rows: int, length: int, number: int) -> dict[str, torch.Tensor]:
        length += 0 if self._caches else number
        ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
        return dict.fromkeys(self._names, ids)

    def inputs(self, microbatch: int, number: int, tokens: Any) -> dict[str, torch.Tensor]:
        part, came = self._parts[microbatch], self._came[microbatch]
        end = part.shape[1] + number
        begin = end - 1 if self._caches and self._is_begun else 0
        given = {}
        if tokens is not None:
            if number == len(came):  # not yet told to another stage of this process
                came.append(tokens[:, None].to(part))
            given[self.input_name] = came[number] if self._caches else torch.cat(came, 1)
        if "position_ids" in self._names:
            positions = torch.arange(begin, end, device=part.device)
            given["position_ids"] = positions.expand(len(part), -1)
        return given

    def chosen(self, microbatch: int) -> torch.Tensor:
        return self._tokens[microbatch][-1]

    def _choose(self, module: nn.Module, args: Any, output: Any) -> None:
        """Choose the next token of each row, behind the last stage."""
        m = self._microbatch
        if m is None:
            return
        found = getattr(output, "logits", output)
        found = found[0] if isinstance(found, tuple | list) else found
        logits = found[:, -1].detach()
        number = len(self._tokens[m])
        noise, uses = self._noise.get(number) or (self._choice.noise(logits), len(self._rows))
        self._noise[number] = (noise, uses - 1)
        if uses == 1:
            del self._noise[number]
        if noise is not None:
            noise = torch.split(noise, self._rows)[m]
        tokens = self._choice.tokens(logits, noise)
        eos = self._choice.eos
        if eos is not None:
            ended = self._has_ended[m].to(tokens.device)
            tokens = tokens.masked_fill(ended, eos)
            self._has_ended[m] = ended | (tokens == eos)
        self._tokens[m].append(tokens)

    # Caches

    def _hook_modules(self) -> list[Any]:
        handles = [
            stage.submod.register_forward_hook(self._choose)
            for stage in self._schedule.stages
            if stage.is_last
        ]
        if self._caches:
            for layers in self._layers.values():
                for layer in layers.values():
                    hook = layer.register_forward_pre_hook(self._give_cache, with_kwargs=True)
                    handles.append(hook)
        return handles

    def _give_cache(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._microbatch is None:
            return args, kwargs
        if kwargs.get("past_key_values") is not None:
            raise InputError(
                "the model makes a key-value cache of its own, which would travel from stage to "
                "stage: set model.config.use_cache = False before it is traced"
            )
        return args, {**kwargs, "past_key_values": self._caches[self._microbatch]}

    def _check_caches(self) -> None:
        """Compare what the caches hold with the tokens that have gone in: all but the newest."""
        for part, cache in zip(self._parts, self._caches, strict=False):
            for layers in self._layers.values():
                for path, layer in layers.items():
                    held, wanted = cache.get_seq_length(layer.layer_idx), part.shape[1] - 1
                    assert held == wanted, f"{path} has cached {held} of {wanted} tokens"

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
