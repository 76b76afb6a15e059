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


def test_schedule_classes_keep_the_peers_arguments() -> None:
    import inspect

    ours = list(inspect.signature(fxpipe.Schedule1F1B.__mro__[2].__init__).parameters)
    assert ours[1:8] == [
        "stages",
        "n_microbatches",
        "loss_fn",
        "args_chunk_spec",
        "kwargs_chunk_spec",
        "output_merge_spec",
        "scale_grads",
    ]
