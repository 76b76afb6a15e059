import json

import pytest

from fxpipe.errors import PlanError
from fxpipe.planner.cost.hardware import (
    OP_CLASSES,
    Hardware,
    get_hardware,
    get_link,
    load_hardware,
)
from fxpipe.planner.cost.presets import HARDWARE, LINKS
from fxpipe.program import Link


def test_every_machine_of_the_issue_is_a_preset():
    for name in (
        "V100",
        "A100",
        "H100",
        "H200",
        "B200",
        "GB200",
        "MI300X",
        "L40S",
        "RTX4090",
        "CPU-core",
    ):
        assert get_hardware(name).name == name
    for name in ("NVLink", "PCIe", "InfiniBand", "Ethernet"):
        assert get_link(name) is LINKS[name]


def test_names_forgive_case_and_hyphens():
    assert get_hardware("mi300x") is HARDWARE["MI300X"]
    assert get_hardware("cpu core") is HARDWARE["CPU-core"]
    assert get_link("infiniband-ndr") is LINKS["InfiniBandNDR"]


def test_unknown_preset_lists_the_closest():
    with pytest.raises(PlanError, match=r"no hardware preset 'H1000'; did you mean H100"):
        get_hardware("H1000")
    with pytest.raises(PlanError, match=r"no link preset 'nvlnk'; did you mean NVLink"):
        get_link("nvlnk")


def test_time_is_the_longer_of_arithmetic_and_traffic():
    machine = Hardware(
        "m", {"float32": 100.0}, 10.0, 1.0, Link(), Link(),
        efficiency={"matmul": 0.5, "memory": 1.0}, overhead=0.25,
    )  # fmt: skip

    assert machine.time("matmul", "float32", 1000.0, 10.0) == 1000 / 50 + 0.25
    assert machine.time("matmul", "float32", 10.0, 1000.0) == 1000 / 10 + 0.25
    assert machine.time("memory", "float32", 1000.0, 10.0) == 1 + 0.25


def test_a_dtype_without_a_rate_runs_at_that_of_the_next_wider_one():
    a100, cpu = HARDWARE["A100"], HARDWARE["CPU-core"]

    assert a100.peak("float8") == a100.flops["bfloat16"]
    assert cpu.peak("bfloat16") == cpu.flops["float32"]
    assert cpu.peak("complex64") == cpu.flops["float32"]


def test_ranks_of_one_node_use_the_inner_link():
    machine = HARDWARE["H100"]

    assert machine.link(0, 7) is machine.intra
    assert machine.link(7, 8) is machine.inter


@pytest.mark.parametrize("name", HARDWARE)
def test_json_round_trip(name):
    machine = HARDWARE[name]

    assert Hardware.from_json(machine.to_json()) == machine
    assert set(machine.efficiency) == set(OP_CLASSES)


def test_a_file_can_build_on_a_preset(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        'base = "H100"\nname = "ours"\nranks_per_node = 4\n'
        'inter = "Ethernet100"\n[intra]\nlatency = 1e-6\nbandwidth = 2e11\n'
        "[efficiency]\nmatmul = 0.6\n"
    )

    machine = load_hardware(path)

    assert machine.name == "ours"
    assert machine.flops == HARDWARE["H100"].flops
    assert machine.intra == Link(1e-6, 2e11)
    assert machine.inter == LINKS["Ethernet100"]
    assert machine.efficiency["matmul"] == 0.6
    assert machine.efficiency["attention"] == HARDWARE["H100"].efficiency["attention"]


def test_a_bad_description_lists_every_fault():
    with pytest.raises(PlanError) as caught:
        Hardware.from_dict({"name": "x", "memry": 1, "efficiency": 3})

    message = str(caught.value)
    assert "no field 'memry'; did you mean memory" in message
    assert "efficiency is 3" in message
    assert "missing: flops, memory_bandwidth, memory, intra, inter" in message


def test_senseless_numbers_are_refused_together():
    with pytest.raises(PlanError) as caught:
        Hardware.from_dict(
            {"base": "A100", "memory": -1, "flops": {"float31": 1}, "efficiency": {"matmul": 7}}
        )

    message = str(caught.value)
    assert "memory is -1" in message
    assert "flops has 'float31'" in message
    assert "efficiency['matmul'] is 7" in message
    # Half a rank per node, and words for numbers, were taken in silence.
    with pytest.raises(PlanError) as caught:
        Hardware.from_toml(
            "base = 'H100'\nranks_per_node = 2.5\nreserve = nan\nerror = '6%'\n"
            "overlaps_transfers = 'yes'"
        )
    for fault in (
        "ranks_per_node is 2.5", "reserve is nan", "error is '6%'", "overlaps_transfers is 'yes'",
    ):  # fmt: skip
        assert fault in str(caught.value)


def test_text_that_is_not_json_or_toml_is_refused(tmp_path):
    with pytest.raises(PlanError, match="not JSON"):
        Hardware.from_json("{")
    with pytest.raises(PlanError, match="is a table, got list"):
        Hardware.from_json(json.dumps([1]))
    with pytest.raises(PlanError, match="not TOML"):
        Hardware.from_toml("= 1")
    with pytest.raises(PlanError, match="cannot read"):
        load_hardware(tmp_path / "nothing.json")
    with pytest.raises(PlanError, match="a link is a preset name or a table"):
        Hardware.from_dict({"base": "A100", "intra": {"latency": 1.0}})
