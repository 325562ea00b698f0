"""The torch plane's scheduler and runner on a small hybrid model, stepped by the test."""

from __future__ import annotations

from typing import Any

import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.compressed_cache import CompressedCache
from pocketllm.torch_engine.layers.state_cache import HybridCache, StateCache
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.model_runner import ModelRunner
from pocketllm.torch_engine.models.deepseek_v4 import DeepseekV4
from pocketllm.torch_engine.models.qwen3_5 import Qwen3_5
from pocketllm.torch_engine.runner import Draw
from pocketllm.torch_engine.scheduler import Row, Scheduler
from pocketllm.torch_engine.state_pool import StatePool


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' own answer."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return answer[0, len(prompt) :].tolist()


class Plane:
    """Scheduler and runner, stepped by the test as the engine does.

    Attributes:
        answers: ids by request.
        logits: by request, what each of its ids was drawn from.
        computed: tokens that each request computed.
    """

    def __init__(
        self,
        model: Qwen3_5 | DeepseekV4,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        slots: int = 5,
        chunk: int = 0,
        snapshots: int = 64,
        interval_blocks: int = 3,
        caching: bool = True,
    ) -> None:
        self.states = StatePool(slots, snapshots, interval_blocks)
        self.runner = ModelRunner(model, _cache_of(model, num_blocks, block_size, self.states.num_slots), block_size, 1)
        self.masks = Masks(model.vocab_size)
        self.scheduler = Scheduler(BlockPool(num_blocks, block_size, enable_prefix_caching=caching), slots, chunk, self.states)
        self.answers: dict[str, list[int]] = {}
        self.logits: dict[str, list[torch.Tensor]] = {}
        self.computed: dict[str, int] = {}
        self.rows: dict[str, Row] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.rows[name] = self.scheduler.add(EngineRequest(name, tuple(prompt), max_tokens))
        self.answers[name], self.logits[name], self.computed[name] = [], [], 0

    def step(self) -> None:
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        model = self.runner.model
        seen: list[torch.Tensor] = []
        original = model.logits
        model.logits = lambda hidden: seen.append(original(hidden)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
        try:
            results = self.runner.execute(step, self.masks, self.scheduler.take_copies())
        finally:
            del model.logits
        sampling = sorted((one for one in step if one.samples), key=lambda one: one.num_tokens != 1)  # the batch's own order
        for one, logits in zip(sampling, seen[0] if seen else [], strict=True):
            self.logits[one.row.request.request_id].append(logits.clone())
        for one in step:
            self.computed[one.row.request.request_id] += one.num_tokens
        self.scheduler.advance(step)
        for update in self.scheduler.resolve(step, {place: draw.token_id for place, draw in results.items() if isinstance(draw, Draw)}):
            self.answers[update.row.request.request_id].extend(update.token_ids)
        self.scheduler.check_integrity()

    def run(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
        assert self.scheduler.pool.num_used == 0

    def ask(self, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Answer and cached tokens of one request by itself."""
        name = f"r{len(self.rows)}"
        self.add(name, prompt, max_tokens)
        self.run()
        cached = self.rows[name].cached_tokens
        assert cached is not None
        if not self.scheduler.num_preemptions:
            assert self.computed[name] == len(prompt) + len(self.answers[name]) - 1 - cached
        return self.answers[name], cached


def assert_logits(plane: Plane, name: str, oracle: Any, prompt: list[int]) -> None:
    """Within 1e-4, relative to the largest, of one pass of transformers over prompt and answer."""
    ids = torch.tensor([prompt + plane.answers[name]])
    with torch.no_grad():
        wanted = oracle(ids).logits[0, len(prompt) - 1 : -1]
    got = torch.stack(plane.logits[name])
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def _cache_of(model: Qwen3_5 | DeepseekV4, num_blocks: int, block_size: int, num_slots: int) -> KVCache:
    if isinstance(model, DeepseekV4):
        return CompressedCache(model.config.cache, num_blocks, block_size, num_slots, torch.float32)
    config = model.config
    states = StateCache(config.num_state_layers, num_slots, config.delta_net.state_shape)
    return HybridCache(config.num_attention_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim, torch.float32, states)
