"""From the exchanges of one load point to its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pocketllm.bench.exchange import Answer, Exchange, read_answer
from pocketllm.bench.load import ClientWatch
from pocketllm.bench.spread import percentiles

_BUSY = 0.9  # share of a core from which on the client may be what limits the figures
_LATE = 0.003  # seconds: above what the timers' own coarseness explains
_LATE_SHARE = 0.1  # of the median time between tokens


def point_report(exchanges: Sequence[Exchange], watch: ClientWatch, goodput: dict[str, float]) -> dict[str, Any]:
    """The figures of one load point, as JSON; docs/benchmarks.md says what each means.

    Args:
        exchanges: of all its requests.
        watch: of the client, meanwhile.
        goodput: limits in milliseconds, as of `workload.parse_goodput`.
    """
    read = [read_answer(exchange) for exchange in exchanges]
    answers = [one for one in read if isinstance(one, Answer)]
    errors = Counter(one for one in read if isinstance(one, str))
    latencies = [_latencies(answer) for answer in answers]
    tokens = sum(sum(answer.tokens) for answer in answers)
    gaps = np.concatenate([np.diff(answer.events) for answer in answers]) * 1e3 if answers else np.empty(0)
    inter_token = np.concatenate([one["itl_all"] for one in latencies]) if latencies else np.empty(0)
    counted = [answer.completion_tokens or 0 for answer in answers]
    report: dict[str, Any] = {
        "seconds": watch.seconds,
        "requests": len(exchanges),
        "completed": len(answers),
        "errors": dict(sorted(errors.items())),
        "finish_reasons": dict(sorted(Counter(str(answer.finish_reason) for answer in answers).items())),
        "requests_per_s": len(answers) / watch.seconds,
        "output_tokens_per_s": tokens / watch.seconds,
        "prompt_tokens": percentiles([answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]),
        "completion_tokens": percentiles([float(one) for one in counted]) if any(counted) else None,
        "ttft_ms": percentiles([one["ttft"] for one in latencies]),
        "tpot_ms": percentiles([one["tpot"] for one in latencies if one["tpot"] is not None]),
        "itl_ms": percentiles(inter_token),
        "event_gap_ms": percentiles(gaps),
        "e2e_ms": percentiles([one["e2e"] for one in latencies]),
        "tokens_per_event": tokens / sum(len(answer.events) for answer in answers) if answers else None,
        "spread_share": _spread_share(answers),
        "token_counts": "usage" if answers and all(answer.is_counted for answer in answers) else "events",
        "goodput": _goodput(latencies, goodput, watch.seconds) if goodput else None,
    }
    report["client"] = _client(exchanges, watch, report["itl_ms"])
    return report


def notes(report: dict[str, Any]) -> list[str]:
    """What a reader of a point's figures has to know, in sentences."""
    found = list(report["client"]["reasons"])
    if (share := report["spread_share"]) is not None and share > 0.005:
        found.append(
            f"{share:.0%} of the inter-token times come from chunks that held several tokens ({report['tokens_per_event']:.2f} a chunk on average): "
            "such a gap is divided among its tokens, and event_gap_ms has the gaps as they were"
        )
    if report["completed"] and report["token_counts"] == "events":
        found.append("the server sent no usage for some requests: each of their chunks is taken for one token")
    if report["errors"]:
        found.append(
            f"{sum(report['errors'].values())} of {report['requests']} requests failed: "
            + ", ".join(f"{count} x {kind}" for kind, count in report["errors"].items())
        )
    return found


def _latencies(answer: Answer) -> dict[str, Any]:
    """Milliseconds of one answer. `tpot` leaves out the tokens that came with the first event, and is None where no others came."""
    gaps, counts = np.diff(answer.events) * 1e3, np.asarray(answer.tokens[1:], np.int64)
    inter_token = np.repeat(gaps / counts, counts)
    later = int(counts.sum())
    return {
        "ttft": (answer.events[0] - answer.sent_at) * 1e3,
        "tpot": (answer.events[-1] - answer.events[0]) * 1e3 / later if later else None,
        "itl_all": inter_token,
        "itl": float(np.percentile(inter_token, 99)) if later else 0.0,
        "e2e": (answer.ended_at - answer.sent_at) * 1e3,
    }


def _spread_share(answers: Sequence[Answer]) -> float | None:
    """Share of the inter-token times that were divided."""
    counts = [count for answer in answers for count in answer.tokens[1:]]
    return sum(count for count in counts if count > 1) / sum(counts) if counts else None


def _goodput(latencies: Sequence[dict[str, Any]], limits: dict[str, float], seconds: float) -> dict[str, Any]:
    good = sum(all((one[name] or 0.0) <= limit for name, limit in limits.items()) for one in latencies)
    return {"limits_ms": limits, "requests": good, "requests_per_s": good / seconds, "share": good / len(latencies) if latencies else 0.0}


def _client(exchanges: Sequence[Exchange], watch: ClientWatch, inter_token: dict[str, float] | None) -> dict[str, Any]:
    """How the client did, and whether it is what the figures show."""
    lag, delay = percentiles(watch.lags), percentiles([exchange.sent_at - exchange.due_at for exchange in exchanges])
    cpu = watch.cpu_seconds / watch.seconds
    late = max(_LATE, _LATE_SHARE * inter_token["p50"] / 1e3 if inter_token else 0.0)
    reasons = []
    if cpu > _BUSY:
        reasons.append(f"the client used {cpu:.0%} of its core: it may be the bottleneck, so send this load from several processes or a faster machine")
    if lag is not None and lag["p99"] > late:
        reasons.append(
            f"the client's event loop was up to {lag['p99'] * 1e3:.1f} ms late (99th percentile): "
            "it, or what else its machine does, may be the bottleneck, and times are too long by as much"
        )
    if delay is not None and delay["p99"] > max(late, 0.01):
        reasons.append(f"requests left up to {delay['p99'] * 1e3:.1f} ms after their time (99th percentile): the client did not keep up the rate")
    return {
        "cpu_share": cpu,
        "loop_lag_ms": _milliseconds(lag),
        "start_delay_ms": _milliseconds(delay),
        "is_bottleneck": bool(reasons),
        "reasons": reasons,
    }


def _milliseconds(found: dict[str, float] | None) -> dict[str, float] | None:
    return None if found is None else {name: value * 1e3 for name, value in found.items()}
