"""What deepseek_cuda.py found, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def table(report: Mapping[str, Any]) -> str:
    """Each rate beside its limit, in Markdown."""
    rows = {(row["section"], row["measure"]): row for row in report["rows"]}
    lines = ["| tokens/s, median (min to max) | experts resident | limit | of it | experts on the host | limit | of it |", "|---|---|---|---|---|---|---|"]
    measures = dict.fromkeys(row["measure"] for row in report["rows"] if row.get("unit") == "tokens/s")
    for measure in measures:
        cells = [measure]
        for section, limit in (("resident", _resident_limit(rows, measure)), ("host", _host_limit(rows, measure))):
            row = rows.get((section, measure))
            cells += ["-", "-", "-"] if row is None else [_rate(row), "-" if limit is None else f"{limit:,.0f}", _share(row, limit)]
        lines.append(f"| {' | '.join(cells)} |")
    token, device, experts = (rows.get(key) for key in (("limits", "token"), ("limits", "device"), ("host", "experts")))
    if token is None or device is None:
        return "\n".join(lines)
    text = (
        f"A token reads {token['bytes_per_token'] / 1e9:.2f} GB, {token['expert_bytes_per_token'] / 1e9:.2f} of them routed experts'; the card reads "
        f"{device['read_bytes_per_s'] / 1e12:.2f} TB/s and multiplies at {device['bf16_flops_per_s'] / 1e12:.0f} TFLOP/s in bf16."
    )
    if experts is not None and "pinned_to_device_bytes_per_s" in device:
        text += (
            f" With experts on the host {experts['hits'] / experts['lookups']:.0%} of lookups found theirs among {experts['cached_bytes'] / 2**30:.1f} GiB "
            f"on the card; copies to it run at {device['pinned_to_device_bytes_per_s'] / 1e9:.0f} GB/s from pinned memory and "
            f"{device['host_to_device_bytes_per_s'] / 1e9:.0f} from other, which is the limit of those that were not there."
        )
    return "\n".join([*lines, "", text])


def _resident_limit(rows: Mapping[tuple[str, str], Mapping[str, Any]], measure: str) -> float | None:
    ceilings = rows.get(("limits", "ceilings"))
    return None if ceilings is None else ceilings[measure.partition(" ")[0]]


def _host_limit(rows: Mapping[tuple[str, str], Mapping[str, Any]], measure: str) -> float | None:
    """Of decoding: a token's bytes read, and the experts that were not on the card brought over from pinned memory."""
    token, device, experts = (rows.get(key) for key in (("limits", "token"), ("limits", "device"), ("host", "experts")))
    if token is None or device is None or experts is None or not measure.startswith("decode") or "pinned_to_device_bytes_per_s" not in device:
        return None
    missed = 1 - experts["hits"] / experts["lookups"]
    copied = missed * token["expert_bytes_per_token"] / device["pinned_to_device_bytes_per_s"]
    return float(1 / (copied + token["bytes_per_token"] / device["read_bytes_per_s"]))


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['median']:,.1f} ({row['min']:,.1f} to {row['max']:,.1f})"


def _share(row: Mapping[str, Any], limit: float | None) -> str:
    return "-" if limit is None else f"{row['median'] / limit:.0%}"
