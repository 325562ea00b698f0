"""Any OpenAI-compatible server, as its clients see it: HTTP and its tokenizer are in every figure."""

from __future__ import annotations

from typing import Any

from pocketllm.bench.endpoint import Endpoint, first_model
from pocketllm.bench.exchange import Answer, read_answer
from pocketllm.bench.load import run_client, run_load
from pocketllm.bench.sides.base import Side, Spec, StoppedEarlyError, Timing
from pocketllm.bench.workload import Arrivals, draw_asks
from pocketllm.errors import BackendUnavailableError


class UrlSide(Side):
    """See Side. Prompts are random words of about as many tokens; rates count the tokens that the server counts."""

    name = "url"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        url = str(spec.model)
        self._endpoint = Endpoint(url, "completions", first_model(url, None))

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError("prompts are words here")

    @property
    def facts(self) -> dict[str, Any]:
        return {"url": str(self.spec.model), "model": self._endpoint.model, "peak_rss_bytes": None}  # the server's memory is not this process's

    def prefill(self, rows: int, tokens: int) -> Timing:
        answers = self._answers(rows, tokens, 1)
        return Timing(sum(answer.prompt_tokens or tokens for answer in answers), _end(answers, 0) - _begin(answers))

    def decode(self, rows: int, context: int, steps: int) -> Timing:
        answers = self._answers(rows, context, steps + 1)
        began, ended = _end(answers, 0), min(answer.events[-1] for answer in answers)
        tokens = sum(count for answer in answers for at, count in zip(answer.events, answer.tokens, strict=True) if began < at <= ended)
        if not tokens:
            raise StoppedEarlyError("an answer ended before all had begun")
        return Timing(tokens, ended - began)

    def whole(self, rows: int, prompt: int, answer: int) -> Timing:
        answers = self._answers(rows, prompt, answer)
        return Timing(sum(sum(one.tokens) for one in answers), _end(answers, -1) - _begin(answers))

    def _answers(self, rows: int, prompt: int, budget: int) -> list[Answer]:
        asks = draw_asks(rows, "fixed", prompt, budget, seed=self._random.getrandbits(32))
        exchanges, _ = run_client(run_load(self._endpoint, asks, Arrivals(concurrency=rows)))
        answers = []
        for exchange in exchanges:
            answer = read_answer(exchange)
            if not isinstance(answer, Answer):
                raise BackendUnavailableError(f"{self._endpoint.url} did not answer ({answer}): check the server and its /v1/completions.")
            if budget > 2 and sum(answer.tokens) < budget // 2:
                raise StoppedEarlyError(f"an answer of {budget} tokens ended after {sum(answer.tokens)}")
            answers.append(answer)
        return answers


def _begin(answers: list[Answer]) -> float:
    return min(answer.sent_at for answer in answers)


def _end(answers: list[Answer], event: int) -> float:
    return max(answer.events[event] for answer in answers)
