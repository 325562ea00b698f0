"""Memory of a server whose eight contexts are full."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from pocketllm.checkpoint import open_checkpoint
from pocketllm.text.tokenizer import load_tokenizer
from tests.conformance.prompts import TEXTS
from tests.server_process import serve, wait_until_ready

LIMIT = 1.2 * 2**30  # bytes
CONTEXT = 2048
PROMPT = 1990  # tokens, about: a text that is cut between two tokens may be joined in another way


def peak_resident_bytes(pid: int) -> int:
    """VmHWM: the most memory that the process ever held, mapped files included."""
    match = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def mapped_resident_bytes(pid: int, name: str) -> int:
    """Memory that pages of the mapped files of that name take."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith("/" + name)
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="mapped memory is read from /proc, which this system does not have")
def test_a_loaded_model_keeps_no_page_of_its_file(default_model: Path) -> None:
    server = serve("--model", default_model, "--max-model-len", 512)
    try:
        wait_until_ready(server)
        assert mapped_resident_bytes(server.process.pid, default_model.name) < 2**20
    finally:
        server.kill()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc, which this system does not have")
def test_eight_full_contexts_fit(default_model: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(default_model, "auto"))
    ids = tokenizer.encode("\n".join(TEXTS.values()) * 3, add_special_tokens=False)
    prompts = [tokenizer.decode(ids[137 * row : 137 * row + PROMPT], skip_special_tokens=False) for row in range(8)]
    lengths = [len(tokenizer.encode(prompt, add_special_tokens=True)) for prompt in prompts]
    assert all(PROMPT - 10 < length < CONTEXT - 32 for length in lengths)

    async def fill(url: str) -> tuple[list[Any], float]:
        fullest = 0.0
        async with httpx.AsyncClient(base_url=url, timeout=240) as client:
            bodies = [{"prompt": prompt, "max_tokens": CONTEXT - length, "temperature": 0} for prompt, length in zip(prompts, lengths, strict=True)]
            answers = asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            while not answers.done():
                metrics = (await client.get("/metrics")).text
                fullest = max(fullest, *map(float, re.findall(r"^pocketllm_kv_cache_usage_ratio (\S+)$", metrics, re.MULTILINE)))
                await asyncio.sleep(0.05)
            return [answer.json() for answer in await answers], fullest

    server = serve("--model", default_model, "--max-model-len", CONTEXT, "--max-batch-size", 8)
    try:
        answers, fullest = asyncio.run(fill(wait_until_ready(server)))
        peak = peak_resident_bytes(server.process.pid)
    finally:
        server.kill()
    print(f"peak of the server process: {peak / 2**20:.0f} MiB, KV cache {fullest:.0%} full, {[answer['usage']['total_tokens'] for answer in answers]} tokens")
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == lengths
    assert fullest > 0.95
    assert peak < LIMIT
