"""Devices and links that people rent, as data.

Peaks, memory and links are those of the vendors' data sheets: dense rates (no structured
sparsity), tensor or matrix cores for everything below float32. The shares that a device
reaches are set to published training runs where there are some (see
`benchmarks.published`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fxpipe.planner.cost.hardware import Hardware
from fxpipe.program import Link

__all__ = ["EXPERTS_ERROR", "HARDWARE", "LINKS"]

# One direction, of one device. Bandwidths are the vendors' figures (half of what they quote
# for both directions together); latencies are the usual order of magnitude of a message.
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "NVLink": Link(3e-6, 450e9),
        "NVLink3": Link(3e-6, 300e9),  # A100: 600 GB/s in both directions
        "NVLink4": Link(3e-6, 450e9),  # H100, H200: 900 GB/s in both directions
        "NVLink5": Link(3e-6, 900e9),  # B200: 1.8 TB/s in both directions
        "NVLink2": Link(3e-6, 150e9),  # V100: 300 GB/s in both directions
        "NVLinkC2C": Link(3e-6, 225e9),  # GB200: 900 GB/s in both directions to a CPU, two GPUs
        "InfinityFabric": Link(4e-6, 64e9),  # MI300X: 128 GB/s per pair, both directions
        "PCIe": Link(6e-6, 31.5e9),
        "PCIe3": Link(6e-6, 15.75e9),  # 16 lanes of 8 GT/s
        "PCIe4": Link(6e-6, 31.5e9),  # 16 lanes of 16 GT/s
        "PCIe5": Link(6e-6, 63e9),  # 16 lanes of 32 GT/s
        "InfiniBand": Link(6e-6, 50e9),
        "InfiniBandEDR": Link(6e-6, 12.5e9),  # 100 Gbit/s
        "InfiniBandHDR": Link(6e-6, 25e9),  # 200 Gbit/s
        "InfiniBandNDR": Link(6e-6, 50e9),  # 400 Gbit/s
        "InfiniBandXDR": Link(6e-6, 100e9),  # 800 Gbit/s
        "Ethernet": Link(30e-6, 12.5e9),
        "Ethernet10": Link(50e-6, 1.25e9),
        "Ethernet25": Link(40e-6, 3.125e9),
        "Ethernet100": Link(30e-6, 12.5e9),
        "Ethernet400": Link(20e-6, 50e9),
        "Loopback": Link(100e-6, 2e9),  # two processes of one machine over TCP
    }
)

# What copies from and to pinned memory reach of their link: nvbandwidth measures 24.8 GB/s on an
# A100 with PCIe 4.0. The simulator lets copies out and back take turns, since at once they slow
# each other down (https://forums.developer.nvidia.com/t/352186).
_PINNED = 0.79

# Fragmentation. By the rules of torch's allocator (best fit, streams share no block) a stage of
# Llama 3 405B with temporaries of random sizes reserves 7% more than it holds at the median, 10% in
# one of ten cases. Published runs of it that must hold the same (32k tokens) reserved 73, 75 and
# 82 GiB: 8% leaves the last 3% low.
_RESERVE = 0.08

# The same if gradients are made anew between temporaries of the first backward, instead of being
# there from the start: an eighth of their size more.
_HOLES = 0.12

# Shares by device. Those of NVIDIA's from the A100 on are set to published rows, see
# docs/planner.md; the others have Hopper's, which is a guess. `matmul` falls short of the peak
# mostly because of power.
_AMPERE: Mapping[str, Any] = MappingProxyType(
    {
        "efficiency": {"matmul": 0.74, "attention": 0.55, "convolution": 0.5, "memory": 0.8},
        "half_intensity": 60.0,
        "launch": 38e-6,
        "intra_share": 0.75,
        "inter_share": 0.75,
        "jitter": 0.05,
        "error": 0.05,
    }
)
_HOPPER: Mapping[str, Any] = MappingProxyType(
    {
        "efficiency": {"matmul": 0.7, "attention": 0.33, "convolution": 0.5, "memory": 0.8},
        "half_intensity": 60.0,
        "launch": 38e-6,
        "intra_share": 0.75,
        "inter_share": 0.75,
        "jitter": 0.05,
        "error": 0.07,
    }
)
# Nothing was compared with these, so their error is unknown.
_GUESSED: Mapping[str, Any] = MappingProxyType({**_HOPPER, "error": 0.0})
EXPERTS_ERROR = 0.09
"""The median error of held-out rows with experts; a preset's `error` is that of dense models."""

# Both are set to Llama 3 8B. A GB200 gains less from its higher peak than the data sheet says.
_BLACKWELL: Mapping[str, Any] = MappingProxyType(
    {
        **_HOPPER,
        "efficiency": {**_HOPPER["efficiency"], "matmul": 0.62},
        "launch": 22e-6,
        "error": 0.08,
    }
)
_GRACE_BLACKWELL: Mapping[str, Any] = MappingProxyType(
    {
        **_HOPPER,
        "efficiency": {**_HOPPER["efficiency"], "matmul": 0.57},
        "launch": 22e-6,
        "error": 0.11,
    }
)


def _gpu(
    name: str,
    *,
    float64: float,
    float32: float,
    half: float,
    bandwidth: float,
    memory: float,
    intra: str,
    inter: str,
    tf32: float | None = None,
    float8: float | None = None,
    ranks_per_node: int = 8,
    shares: Mapping[str, Any] = _HOPPER,
    host: str = "PCIe5",
) -> Hardware:
    """A device in units of a data sheet: TFLOP/s, TB/s, GB. `host` is its link to the CPU."""
    rates = {"float64": float64, "float32": float32, "float16": half, "bfloat16": half}
    if tf32 is not None:
        rates["tf32"] = tf32
    if float8 is not None:
        rates["float8"] = float8
    return Hardware(
        name,
        {key: value * 1e12 for key, value in rates.items()},
        bandwidth * 1e12,
        memory * 1e9,
        LINKS[intra],
        LINKS[inter],
        ranks_per_node,
        overhead=4e-6,
        context=0.7e9,
        channels=0.2e9,
        reserve=_RESERVE,
        holes=_HOLES,
        host=Link(LINKS[host].latency, LINKS[host].bytes_per_time * _PINNED),
        **shares,
    )


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        # NVIDIA V100 SXM2 32GB data sheet; bfloat16 is not native, its rate is float16's
        "V100": _gpu("V100", float64=7.8, float32=15.7, half=125, bandwidth=0.9, memory=32,
                     intra="NVLink2", inter="InfiniBandEDR", host="PCIe3",
                     shares={**_AMPERE, "error": 0.0}),
        # NVIDIA A100 80GB SXM data sheet
        "A100": _gpu("A100", float64=9.7, float32=19.5, tf32=156, half=312,
                     bandwidth=2.039, memory=80, intra="NVLink3", inter="InfiniBandHDR",
                     shares=_AMPERE, host="PCIe4"),
        # NVIDIA H100 SXM data sheet (its tensor figures are with sparsity: halved here)
        "H100": _gpu("H100", float64=34, float32=67, tf32=494.5, half=989.5, float8=1979,
                     bandwidth=3.35, memory=80, intra="NVLink4", inter="InfiniBandNDR"),
        # NVIDIA H200 SXM data sheet: the same arithmetic, more memory
        "H200": _gpu("H200", float64=34, float32=67, tf32=494.5, half=989.5, float8=1979,
                     bandwidth=4.8, memory=141, intra="NVLink4", inter="InfiniBandNDR"),
        # NVIDIA HGX B200 data sheet, an eighth of the board
        "B200": _gpu("B200", float64=37, float32=75, tf32=1125, half=2250, float8=4500,
                     bandwidth=7.7, memory=180, intra="NVLink5", inter="InfiniBandNDR",
                     shares=_BLACKWELL),
        # NVIDIA GB200 NVL72 data sheet, one of its 72 GPUs, all on one NVLink domain
        "GB200": _gpu("GB200", float64=40, float32=80, tf32=1250, half=2500, float8=5000,
                      bandwidth=8.0, memory=186, intra="NVLink5", inter="InfiniBandNDR",
                      ranks_per_node=72, shares=_GRACE_BLACKWELL, host="NVLinkC2C"),
        # AMD Instinct MI300X data sheet; a ring of collectives uses all seven links of a device
        "MI300X": _gpu("MI300X", float64=81.7, float32=163.4, tf32=653.7, half=1307.4,
                       float8=2614.9, bandwidth=5.3, memory=192, intra="InfinityFabric",
                       inter="InfiniBandNDR", shares={**_GUESSED, "efficiency": {"matmul": 0.5}}),
        # NVIDIA L40S data sheet (halved: its tensor figures are with sparsity); no NVLink
        "L40S": _gpu("L40S", float64=1.4, float32=91.6, tf32=183, half=362, float8=733,
                     bandwidth=0.864, memory=48, intra="PCIe4", inter="Ethernet100", host="PCIe4",
                     shares=_GUESSED),
        # NVIDIA Ada whitepaper, GeForce RTX 4090 with float32 accumulation; no peer access
        "RTX4090": _gpu("RTX4090", float64=1.3, float32=82.6, tf32=82.6, half=165.2,
                        float8=330.3, bandwidth=1.008, memory=24, intra="PCIe4",
                        inter="Ethernet25", host="PCIe4", shares=_GUESSED),
        # One core with 256-bit vectors at 3 GHz: two multiply-adds of eight floats a cycle;
        # its share of a memory channel. bfloat16 and float16 are computed in float32.
        "CPU-core": Hardware(
            "CPU-core", {"float64": 48e9, "float32": 96e9}, 10e9, 4e9,
            LINKS["Loopback"], LINKS["Ethernet10"], overhead=5e-6, overlaps_transfers=False,
            fuses_attention=False,
        ),
    }
)  # fmt: skip
