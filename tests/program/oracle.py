"""A second opinion on programs: slow, literal, and sharing no code with the validator.

`finishes` plays unbuffered communication with real queues. `is_sound` also counts the
work. Both only ask the table of reads and writes.
"""

from collections import Counter, deque

from fxpipe.program import Action, Edges, Kind, Program, Value, ValueKind, reads, writes


def finishes(program: Program, edges: Edges, streams: str) -> bool:
    """Whether every rank ends and every message is delivered without any buffer.

    Each rank posts sends and receives to a queue per stream and goes on; a message moves
    when it is at the head of both queues; a compute action waits for its values.
    """
    rank_of = program.placement.stage_to_rank
    lowered = program.is_lowered
    have: list[set[Value]] = [set() for _ in program.ranks]
    queues: dict[tuple[tuple[int, int], int], deque[tuple[str, Value]]] = {}
    at = [0] * program.num_ranks

    def stream_of(value: Value) -> tuple[int, int]:
        ends = (rank_of[value.stage], rank_of[value.peer])
        return (min(ends), max(ends)) if streams == "pair" else ends

    def key(rank: int, value: Value) -> tuple[tuple[int, int], int]:
        return (stream_of(value) if streams != "rank" else (-1, -1), rank)

    def post(rank: int, half: str, value: Value) -> None:
        queues.setdefault(key(rank, value), deque()).append((half, value))

    def step(rank: int) -> bool:
        if at[rank] == len(program.ranks[rank]):
            return False
        action = program.ranks[rank][at[rank]]
        if not set(reads(action, edges)) <= have[rank]:
            return False
        if action.kind.is_send:
            post(rank, "send", reads(action, edges)[0])
        elif action.kind.is_recv:
            post(rank, "recv", writes(action, edges)[0])
        else:
            for value in writes(action, edges):
                have[rank].add(value)
                if not lowered:
                    have[rank_of[value.peer]].add(value)
        at[rank] += 1
        return True

    def deliver() -> bool:
        for (_, rank), queue in queues.items():
            if not queue:
                continue
            value = queue[0][1]
            ends = (rank_of[value.stage], rank_of[value.peer])
            across = queues.get(key(ends[0] if rank == ends[1] else ends[1], value))
            if across and value == across[0][1] and queue[0][0] != across[0][0]:
                queue.popleft()
                across.popleft()
                have[rank_of[value.peer]].add(value)
                return True
        return False

    while sum(step(rank) for rank in range(program.num_ranks)) or deliver():
        pass
    done = all(i == len(actions) for i, actions in zip(at, program.ranks, strict=True))
    return done and not any(queues.values())


def is_sound(program: Program, edges: Edges, streams: str = "pair") -> bool:
    """Whether the program does all the work once, where it belongs, and ends."""
    try:
        return (
            _actions_belong(program, edges)
            and _work_is_complete(program)
            and _transfers_are_unique(program)
            and _parameters_are_handled(program)
            and finishes(program, edges, streams)
        )
    except (IndexError, KeyError, TypeError, AttributeError, AssertionError):
        return False


def _parts(program: Program) -> list[tuple[int, Action]]:
    return [
        (rank, part)
        for rank, actions in enumerate(program.ranks)
        for action in actions
        for part in action.parts or (action,)
    ]


def _actions_belong(program: Program, edges: Edges) -> bool:
    rank_of = program.placement.stage_to_rank
    links = {(e.source, e.target) for e in edges.edges}
    back = {(e.target, e.source) for e in edges.edges if e.has_gradient}
    for rank, action in _parts(program):
        if not 0 <= action.stage < program.num_stages or rank_of[action.stage] != rank:
            return False
        per_microbatch = action.kind.is_compute or action.kind.is_transfer
        if per_microbatch and action.microbatch not in range(program.num_microbatches):
            return False
        if not per_microbatch and action.microbatch is not None:
            return False
        if action.kind.is_transfer:
            assert action.peer is not None
            way = (action.stage, action.peer)[:: 1 if action.kind.is_send else -1]
            ways = links if "F" in action.kind.text else back
            if way not in ways or rank_of[action.peer] == rank:
                return False
    return True


def _work_is_complete(program: Program) -> bool:
    count = Counter((a.kind, a.stage, a.microbatch) for _, a in _parts(program))
    any_backward = any(
        kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) for kind, _, _ in count
    )
    for stage in range(program.num_stages):
        for microbatch in range(program.num_microbatches):
            forward, whole, first, second = (count[k, stage, microbatch] for k in Kind if k <= 3)
            if forward != 1:
                return False
            if any_backward and (whole, first, second) not in ((1, 0, 0), (0, 1, 1)):
                return False
    return True


def _transfers_are_unique(program: Program) -> bool:
    transfers = [action for _, action in _parts(program) if action.kind.is_transfer]
    return len(transfers) == len(set(transfers))


def _parameters_are_handled(program: Program) -> bool:
    texts = [[str(action) for action in actions] for actions in program.ranks]
    any_shard = any("SHARD" in text for row in texts for text in row)
    any_reduce = any("REDUCE" in text for row in texts for text in row)
    for rank, actions in enumerate(program.ranks):
        for stage in program.placement.stages_of(rank):
            open_ = False
            reduced = 0
            for action in actions:
                mine = [p for p in action.parts or (action,) if p.stage == stage]
                for part in mine:
                    if part.kind is Kind.UNSHARD or part.kind is Kind.RESHARD:
                        if open_ == (part.kind is Kind.UNSHARD):
                            return False
                        open_ = not open_
                    elif part.kind is Kind.REDUCE_GRAD:
                        reduced += 1
                    elif part.kind.is_compute:
                        if any_shard and not open_:
                            return False
                        if reduced and part.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                            return False
            has_gradient = any(
                p.stage == stage and p.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
                for a in actions
                for p in a.parts or (a,)
            )
            if open_ or (any_reduce and (reduced != 1 or not has_gradient)):
                return False
    return True


def messages(program: Program) -> list[ValueKind]:
    """What a program sends, by kind; for counting."""
    return [
        ValueKind.ACTIVATION if a.kind is Kind.SEND_ACTIVATION else ValueKind.GRADIENT
        for actions in program.ranks
        for a in actions
        if a.kind.is_send
    ]
