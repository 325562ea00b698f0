"""How the Triton kernels are started: what depends on the device and not on the operator.

Programmatic dependent launch (compute capability 9.0 on) lets a kernel begin while the one before it drains. Every kernel launched that way
calls `wait_for_inputs` once, in every program, before it touches anything that an earlier kernel wrote or still reads; only constants
(weights) may be read before. A kernel without the switch is launched when all before it are done, as usual, so the two kinds mix.

A kernel that takes EARLY may be told more: that a launch of the usual kind lies between it and whatever wrote the caches and the step's integers,
except for what the kernel just ahead writes. A step of a model is such a case, for it begins with one of torch's kernels; so is a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) where Triton's interpreter stands for one."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def least_columns(x: torch.Tensor, rows: int, num_warps: int) -> int:
    """Columns that x, the right operand of a product, has to have at least where `rows` rows of the left one are made in registers: the 16 of a tensor
    core, and 32 on Hopper, where Triton 3.6 was seen to multiply wrongly by 16 columns as soon as four warps do it together, from 64 rows on."""
    return 32 if x.element_size() == 2 and capability(x.device)[0] == 9 and rows >= 64 and num_warps >= 4 else 16


@cache
def uses_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` are launched before the kernel ahead of them has ended."""
    return capability(device) >= (9, 0)


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What tile sizes are chosen by.

    Args:
        num_multiprocessors: streaming multiprocessors of the device.
        shared_memory: bytes that one program may use.
        tensor_cores: whether Triton multiplies matrices on tensor cores there.
        overlaps: whether kernels begin while the one ahead of them drains.
    """

    num_multiprocessors: int
    shared_memory: int
    tensor_cores: bool
    overlaps: bool = False


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of a CUDA device; in the interpreter those of a Hopper GPU of one multiprocessor."""
    if device.type != "cuda":
        return DeviceLimits(1, 227 * 1024, True)
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return DeviceLimits(properties["multiprocessor_count"], properties["max_shared_mem"], capability(device) >= (8, 0), uses_pdl(device))


def launch_options(device: torch.device) -> dict[str, Any]:
    """Options of a launch of a kernel that calls `wait_for_inputs(PDL)`, its constexpr PDL among them."""
    pdl = uses_pdl(device)
    return {"PDL": pdl, "launch_pdl": pdl} if pdl else {"PDL": False}


@triton.jit
def begin_next(PDL: tl.constexpr):
    """Let the next kernel's programs begin where there is room: for a kernel that has something to wait for before its `wait_for_inputs`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Let the next kernel's programs begin where there is room, and wait until all kernels before this one are done."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
