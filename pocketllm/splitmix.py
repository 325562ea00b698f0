"""SplitMix64 (Steele, Lea and Flood, 2014): numbers that depend on a start and an index alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def splitmix64(start: Any, index: Any) -> Any:
    """Output number `index`, from 0, of the stream that begins at `start`; both np.uint64, single or arrays of one shape."""
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        mixed = start + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return mixed ^ mixed >> np.uint64(31)
