"""Generate tokens with a pipeline: the plain model's tokens, from many sequences at once.

    tokens = generate(schedule, input_ids, max_new_tokens=20)     # on every rank

Sequences are the rows of a batch, split into the schedule's microbatches: while one stage works on
some sequences, the others work on others. The prompts go through the stages first; then all
microbatches go round (`fxpipe.schedules.rounds`), up to `ROUNDS` tokens in one call. With at least
as many microbatches as ranks no rank waits for a token. Each stage keeps the keys and values of its
own attention layers, one cache per microbatch; they never travel. What travels is the hidden state
of the newest tokens, and the tokens themselves, which the rank of the last stage chooses.

Caches are used where they are known to be right (`fxpipe.training.kv_caches`), in models traced
with `position_ids` among their inputs. Any other model is given the whole sequence again for each
token, with the same result. Hand-written stages, DTensors at boundaries and schedules with hooks of
the user's make one token per call.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.microbatch import Microbatches
from fxpipe.program import Action
from fxpipe.runtime.stage.stage_kind import TracedFront
from fxpipe.schedules import Schedule
from fxpipe.schedules.rounds import can_go_round, has_hooks, rounds_of
from fxpipe.training.kv_caches import cached_layers, make_caches, why_whole_sequences
from fxpipe.training.pipeline import Pipeline, evaluation

__all__ = ["ROUNDS", "generate"]

_log = logging.getLogger(__name__)

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
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    input_name: str = "input_ids",
) -> list[torch.Tensor]:
    """The prompts with the tokens that follow. Call it on every rank, with the same arguments.

    Args:
        input_ids: prompts of one length as a tensor of rows, or a list of prompts of any length,
            as many as the schedule has microbatches.
        do_sample: draw from the most likely `top_k` tokens (default: all), of these from the fewest
            that have the probability `top_p` together, at a `temperature`, with torch's generator
            on the rank of the last stage; otherwise take the most likely one.
        eos_token_id: a sequence ends here, or at one of several; all end when each has.
        input_name: what the model calls its tokens.

    Returns:
        one tensor per sequence, on every rank.

    Raises:
        InputError: on all ranks: a wrong argument, or ranks have different ones.
    """
    schedule = pipe.schedule if isinstance(pipe, Pipeline) else pipe
    if not isinstance(schedule, Schedule):
        raise InputError(
            f"generate() needs a Pipeline or a schedule, got {type(schedule).__name__}"
        )
    problem: BaseException | None = None
    parts: list[torch.Tensor] = []
    said = ""
    several = eos_token_id if isinstance(eos_token_id, Sequence) else [eos_token_id]
    ends = tuple(one for one in several if one is not None)
    choice = _Choice(do_sample, temperature, top_k, top_p, ends)
    try:
        choice.check()
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise InputError(
                f"max_new_tokens must be a whole number of at least 1, got {max_new_tokens!r}"
            )
        parts = _microbatches(input_ids, schedule.n_microbatches)
        digest = hashlib.sha256(repr([part.tolist() for part in parts]).encode()).hexdigest()
        shapes = [list(part.shape) for part in parts]
        said = f"max_new_tokens={max_new_tokens}, {choice}, prompts {shapes} ({digest[:8]})"
    except BaseException as error:
        problem = error
    schedule.check_alike("generate", "what generate() is asked for", said, problem)
    begins = [part.shape[1] for part in parts for _ in part]
    context = pipe.context if isinstance(pipe, Pipeline) else contextlib.nullcontext
    with evaluation(schedule.stages), context():
        sequences = _Sequences(schedule, parts, choice, input_name, max(begins) + max_new_tokens)
        sequences.extend(max_new_tokens)
    found = [row for part in parts for row in part]
    return [_ended(row, begin, ends) for row, begin in zip(found, begins, strict=True)]


@dataclass(frozen=True, slots=True)
class _Choice:
    """How tokens are chosen."""

    do_sample: bool
    temperature: float
    top_k: int | None
    top_p: float | None
    ends: tuple[int, ...]

    def __str__(self) -> str:
        how = f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}"
        ends = list(self.ends) or None
        return f"do_sample={self.do_sample}, {how}, eos_token_id={ends}"

    def check(self) -> None:
        how = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        given = {name: value for name, value in how.items() if value not in (None, 1.0)}
        if given and not self.do_sample:
            raise InputError(f"{given} has no effect without do_sample=True")
        if not self.temperature > 0:
            raise InputError(f"temperature must be above 0, got {self.temperature}")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise InputError(
                f"top_k must be a whole number of at least 1, or None for all, got {self.top_k!r}"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if any(type(end) is not int for end in self.ends):
            raise InputError(f"eos_token_id must be whole numbers, got {self.ends}")

    def noise(self, logits: torch.Tensor, rows: int) -> torch.Tensor | None:
        """For all rows of a batch at once, as the plain model draws."""
        if not self.do_sample:
            return None
        size = (rows, logits.shape[-1])
        return torch.empty(size, device=logits.device).exponential_()

    def tokens(self, logits: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """One for each row. The draw is that of torch.multinomial, with the noise made before."""
        if noise is None:
            return logits.argmax(-1)
        scores = logits.float() / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        if self.top_p is not None and self.top_p < 1:
            ordered, order = scores.sort()
            unlikely = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            unlikely[:, -1] = False
            scores = scores.masked_fill(unlikely.scatter(1, order, unlikely), float("-inf"))
        likely = scores.softmax(-1)
        if likely.isnan().any():
            raise InputError("the model's logits are not finite: there is nothing to draw from")
        return (likely / noise).argmax(-1)


class _Sequences:
    """The sequences of all microbatches, and what the stages of this process keep of them."""

    def __init__(
        self,
        schedule: Schedule,
        parts: list[torch.Tensor],
        choice: _Choice,
        input_name: str,
        longest: int,
    ) -> None:
        self.input_name = input_name
        self._schedule, self._parts, self._choice = schedule, parts, choice
        self._rows = [part.shape[0] for part in parts]
        self._layers = cached_layers(schedule.stages)
        front = schedule.stages[0].front
        has_positions = isinstance(front, TracedFront) and "position_ids" in front.info.input_names
        self._names = [input_name, *["position_ids"] * has_positions]
        self._is_begun = False
        self._microbatch: int | None = None  # while its forward runs: shapes are found without it
        self._caches: list[Any] = []
        if has_positions and self._agree_on_caches(longest):
            self._caches = make_caches(self._layers, len(parts))
        self._came: list[list[torch.Tensor]] = [[] for _ in parts]  # in this call, to this rank
        self._tokens: list[list[torch.Tensor]] = [[] for _ in parts]  # chosen here, in all calls
        self._has_ended = [torch.zeros(n, dtype=torch.bool) for n in self._rows]
        self._noise: dict[int, tuple[torch.Tensor | None, int]] = {}

    def extend(self, count: int) -> None:
        """Put up to `count` tokens after each row, in place of the parts."""
        schedule, ends = self._schedule, self._choice.ends
        begins = [part.shape[1] for part in self._parts]
        is_hooked = has_hooks(schedule)
        handles = self._hook_modules()
        self._follow(schedule)
        try:
            self._call(schedule, 1)
            can_go = can_go_round(schedule) and not is_hooked
            goes_round = all(schedule.gather("generate", can_go))
            rounds: dict[int, Schedule] = {}
            made = 1
            while made < count:
                pairs = zip(self._parts, begins, strict=True)
                if ends and all(_is_end(p[:, at:], ends).any(1).all() for p, at in pairs):
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
        said = schedule.gather("generate", torch.cat(mine).cpu() if mine else None)
        tokens = next(one for one in said if one is not None)
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
        noise, uses = self._noise.get(number) or (
            self._choice.noise(logits, sum(self._rows)),
            len(self._rows),
        )
        self._noise[number] = (noise, uses - 1)
        if uses == 1:
            del self._noise[number]
        if noise is not None:
            noise = torch.split(noise, self._rows)[m]
        tokens = self._choice.tokens(logits, noise)
        ends = self._choice.ends
        if ends:
            ended = self._has_ended[m].to(tokens.device)
            tokens = tokens.masked_fill(ended, ends[0])
            self._has_ended[m] = ended | _is_end(tokens, ends)
        self._tokens[m].append(tokens)

    # Caches

    def _hook_modules(self) -> list[Any]:
        handles = [
            stage.submod.register_forward_hook(self._choose)
            for stage in self._schedule.stages
            if stage.is_last
        ]
        if self._caches:
            for layer in self._layers.values():
                hook = layer.register_forward_pre_hook(self._give_cache, with_kwargs=True)
                handles.append(hook)
        return handles

    def _give_cache(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._microbatch is None:
            return args, kwargs
        assert kwargs.get("past_key_values") is None, "a model's own cache was traced with its size"
        return args, {**kwargs, "past_key_values": self._caches[self._microbatch]}

    def _check_caches(self) -> None:
        """Compare what the caches hold with the tokens that have gone in: all but the newest."""
        for part, cache in zip(self._parts, self._caches, strict=False):
            for path, layer in self._layers.items():
                held, wanted = cache.get_seq_length(layer.layer_idx), part.shape[1] - 1
                assert held == wanted, f"{path} has cached {held} of {wanted} tokens"

    def _agree_on_caches(self, longest: int) -> bool:
        """Whether any rank has layers with caches, and all ranks can use them."""
        front = self._schedule.stages[0].front
        assert isinstance(front, TracedFront)
        one = torch.empty(self._rows[0], 1, dtype=torch.int64, device="meta")
        inputs = dict.fromkeys(self._names, one)
        reason = why_whole_sequences(self._layers, front, inputs, longest) if self._layers else None
        said = self._schedule.gather("generate", (reason, bool(self._layers)))
        reasons = [why for why, _ in said if why is not None]
        if reasons:
            text = "each new token takes the whole sequence through the stages: %s"
            _log.warning(text, reasons[0])
        return not reasons and any(has_layers for _, has_layers in said)


def _microbatches(
    input_ids: torch.Tensor | Sequence[torch.Tensor], count: int
) -> list[torch.Tensor]:
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() != 2 or len(input_ids) < count or not input_ids.shape[1]:
            raise InputError(
                f"prompts must be rows of at least one token, one or more for each of the {count} "
                f"microbatches, got {list(input_ids.shape)}"
            )
        return list(torch.tensor_split(input_ids, count))
    prompts = [torch.as_tensor(prompt) for prompt in input_ids]
    if len(prompts) != count:
        raise InputError(
            f"prompts of different lengths must be as many as the {count} microbatches, "
            f"got {len(prompts)}"
        )
    wrong = [list(prompt.shape) for prompt in prompts if prompt.dim() != 1 or not len(prompt)]
    if wrong:
        raise InputError(f"each prompt of a list must be one row of tokens, got {wrong[0]}")
    return [prompt[None] for prompt in prompts]


def _is_end(tokens: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    return torch.isin(tokens, torch.tensor(ends, dtype=torch.int64, device=tokens.device))


def _ended(row: torch.Tensor, begin: int, ends: Sequence[int]) -> torch.Tensor:
    """A sequence without what follows its first end token."""
    found = _is_end(row[begin:], ends).nonzero()
    return row[: begin + int(found[0]) + 1] if len(found) else row
