"""Kinds of GPUs by what their makers say of them: the limits that a run's speed is judged against.

Sources: the data sheets of NVIDIA's H200, H100 and A100 (SXM modules; dense bfloat16, without sparsity), of NVLink 4
and 3, and of the DGX H200, H100 and A100 systems for the network. Memory is what PyTorch finds on such a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from fewstep.errors import UserError


@dataclass(frozen=True)
class DeviceKind:
    """One GPU of a kind, and what connects it with others. Rates count one direction."""

    name: str
    """As on the command line."""
    title: str
    """As PyTorch names it, or the beginning of that."""
    bf16_flops_per_s: float
    """Dense, at the peak."""
    fp32_flops_per_s: float
    """Without tensor cores."""
    memory_gib: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    """To the other GPUs of the host."""
    host_bytes_per_s: float
    """To the memory of the host (PCIe)."""
    network_bytes_per_s: float
    """To other hosts: this GPU's share of the host's network."""


KINDS = (
    DeviceKind("h200", "NVIDIA H200", 989.4e12, 67e12, 139.8, 4.8e12, 450e9, 64e9, 50e9),
    DeviceKind("h100", "NVIDIA H100 80GB HBM3", 989.4e12, 67e12, 79.1, 3.35e12, 450e9, 64e9, 50e9),
    DeviceKind("a100-80g", "NVIDIA A100-SXM4-80GB", 312e12, 19.5e12, 79.1, 2.039e12, 300e9, 32e9, 25e9),
)


def kind_of(name: str) -> DeviceKind:
    """The kind with this name. Raises UserError for another one."""
    for kind in KINDS:
        if kind.name == name.lower():
            return kind
    known = ", ".join(kind.name for kind in KINDS)
    raise UserError(f"--kind {name}: the kinds with known limits are {known}; write one of them")


def kind_titled(title: str) -> DeviceKind | None:
    """The kind of a device that PyTorch names ``title``; None where its limits are not known."""
    forms = ("NVL", "PCIe")  # other memory, other clocks
    if any(form in title for form in forms):
        return None
    return next((kind for kind in KINDS if title.startswith(kind.title)), None)
