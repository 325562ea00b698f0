"""Percentiles and spreads of samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 90, 95, 99)


def spread(samples: Sequence[float]) -> dict[str, float]:
    """`median`, `min`, `max` and `count` of at least one sample."""
    return {"median": float(np.median(samples)), "min": float(min(samples)), "max": float(max(samples)), "count": float(len(samples))}


def percentiles(samples: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float] | None:
    """`mean`, `p50`, `p90`, `p95`, `p99` and `max`, by linear interpolation between order statistics; None without a sample."""
    values = np.asarray(samples, np.float64)
    if not values.size:
        return None
    found = np.percentile(values, PERCENTILES)
    return {"mean": float(values.mean()), **{f"p{share}": float(one) for share, one in zip(PERCENTILES, found, strict=True)}, "max": float(values.max())}
