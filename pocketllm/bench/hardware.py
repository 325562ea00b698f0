"""What machine and what code a result belongs to."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import pocketllm

_SOURCE = Path(pocketllm.__file__).resolve().parent.parent

# Instruction sets that decide which CPU kernels can run; names as /proc/cpuinfo spells them on x86 and ARM.
_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vbmi",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)
_FLAGS_ARM = ("asimd", "asimddp", "sve", "sve2", "i8mm", "bf16")


def describe_hardware() -> dict[str, Any]:
    """CPU model, cores, instruction sets of note and memory in GiB."""
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "physical_cores": physical_cores(),
        "logical_cores": psutil.cpu_count(logical=True),
        "flags": [flag for flag in (*_FLAGS, *_FLAGS_ARM) if flag in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def physical_cores() -> int:
    """Cores without hyper-threads, or all of them where the system does not tell them apart."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def slug(hardware: dict[str, Any]) -> str:
    """Folder name for results of this machine, such as "amd-epyc-9554-64c"."""
    name = re.sub(r"\((r|tm|c)\)", "", str(hardware["cpu"]), flags=re.IGNORECASE)
    name = re.sub(r"@.*|\bcpu\b|\bprocessor\b|\d+-core", "", name, flags=re.IGNORECASE)
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join([*words, f"{hardware['physical_cores']}c"])


def describe_gpu() -> dict[str, Any] | None:
    """The first CUDA device, its driver and what torch was built for; None without one."""
    import torch  # here, since benchmarks of the front end alone load no torch

    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(0)
    return {
        "gpu": facts.name,
        "count": torch.cuda.device_count(),
        "memory_gib": round(facts.total_memory / 2**30, 1),
        "multiprocessors": facts.multi_processor_count,
        "capability": f"{facts.major}.{facts.minor}",
        "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "cuda": torch.version.cuda,
    }


def gpu_slug(gpu: dict[str, Any]) -> str:
    """Folder name for results of this GPU, such as "nvidia-h200"."""
    return "-".join(re.findall(r"[a-z0-9]+", str(gpu["gpu"]).lower()))


def describe_code() -> dict[str, Any]:
    """Commit of this tree (with "-dirty" when files differ from it) and versions of what was measured."""
    return {
        "commit": _commit() or "not a git checkout",
        "python": sys.version.split()[0],
        "pocketllm": pocketllm.__version__,
        **{name: package_version(name) for name in ("torch", "numpy", "gguf", "tokenizers")},
    }


def package_version(name: str) -> str | None:
    """Version of an installed package; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def peak_rss(pid: int | str = "self") -> int | None:
    """Largest resident set of a process since it started, in bytes; None where /proc does not tell it or the process has ended."""
    # getrusage would count, for a child, what its parent held when it forked.
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux: platform.processor() has to do
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _commit() -> str | None:
    """None without git, and where the package is no checkout of its own: installed below another project's, say."""
    if _run("git", "-C", str(_SOURCE), "rev-parse", "--show-toplevel") != str(_SOURCE):
        return None
    return _run("git", "-C", str(_SOURCE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _run(*command: str) -> str | None:
    """What a command prints; None where it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
