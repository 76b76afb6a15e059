"""The public names: those of torch.distributed.pipelining, and ours."""

import fxpipe
import fxpipe.microbatch
import fxpipe.schedules
import fxpipe.stage


def test_all_names_exist_and_are_listed_once() -> None:
    assert len(set(fxpipe.__all__)) == len(fxpipe.__all__)
    for name in fxpipe.__all__:
        assert hasattr(fxpipe, name), name


def test_names_of_the_peer_are_here() -> None:
    from torch.distributed import pipelining

    missing = [name for name in pipelining.__all__ if not hasattr(fxpipe, name)]

    assert missing == []
    for name in ("_Replicate", "_CustomReducer", "_LossReducer", "sum_reducer", "merge_chunks"):
        assert hasattr(fxpipe.microbatch, name), name
    for name in pipelining.schedules.__all__:
        assert hasattr(fxpipe.schedules, name), name


def test_schedule_classes_take_the_peers_arguments_in_its_order() -> None:
    import inspect

    from torch.distributed.pipelining import schedules as peer

    def arguments(function: object) -> list[str]:
        assert callable(function)
        found = inspect.signature(function).parameters.values()
        return [p.name for p in found if p.kind is not inspect.Parameter.VAR_KEYWORD]

    for name in peer.__all__:
        theirs = getattr(peer, name)
        if not inspect.isclass(theirs) or not name.startswith(("Schedule", "PipelineSchedule")):
            continue
        ours = getattr(fxpipe.schedules, name)
        expected = arguments(theirs.__init__)
        assert arguments(ours.__init__)[: len(expected)] == expected, name
        for method in ("step", "eval"):
            expected = arguments(getattr(theirs, method))
            # By keyword: a newer torch has more of them than an older one, and in between.
            found = [one for one in arguments(getattr(ours, method)) if one in expected]
            assert found == expected, (name, method)


def test_a_registry_entry_is_enough_for_a_schedule_class() -> None:
    import inspect

    from fxpipe.program.generators import SCHEDULES

    for info in SCHEDULES.values():
        if not info.trains:
            continue
        found = fxpipe.get_schedule_class(info.name)
        assert found is getattr(fxpipe, f"Schedule{info.name}")
        assert found.schedule_name == info.name
        assert found.__name__ in fxpipe.schedules.__all__ and found.__name__ in fxpipe.__all__
        assert "n_microbatches" in inspect.signature(found).parameters
        assert info.description.split(".")[0][:20] in (inspect.getdoc(found) or "")


def test_a_schedule_without_a_class_is_refused_by_name() -> None:
    import pytest

    with pytest.raises(fxpipe.ScheduleError, match=r"ForwardOnly has no class.*eval\(\)"):
        fxpipe.get_schedule_class("ForwardOnly")
    with pytest.raises(fxpipe.ScheduleError, match="there is no schedule 'nonsense'"):
        fxpipe.get_schedule_class("nonsense")
