"""Attention over the paged cache by Triton's kernels, against float32 in torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from triton.runtime import driver

from pocketllm.torch_engine.kernels.attention import paged_decode, paged_decode_reference, paged_prefill, paged_prefill_reference
from pocketllm.torch_engine.kernels.attention_config import DecodeConfig, PrefillConfig, decode_candidates, prefill_candidates

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BLOCK_SIZE = 16
# Triton's interpreter takes seconds for what a GPU does at once: there, fewer combinations
IS_GPU = torch.cuda.is_available()
DECODED = [
    (dtype, num_heads, num_kv_heads, splits)
    for dtype in TOLERANCES
    for num_heads, num_kv_heads in ((4, 4), (6, 1), (4, 2))
    for splits in (1, 3)
    if IS_GPU or (dtype, num_kv_heads, splits) in ((torch.float32, 4, 1), (torch.float32, 1, 3), (torch.float16, 1, 1), (torch.bfloat16, 2, 3))
]
WINDOWED = [(window, splits) for window in (1, 7, 40, 1000) for splits in (1, 4) if IS_GPU or splits == 1 or window == 40]


class Cache:
    """Rows in a cache whose blocks are in random order; what no row has is NaN, so that no kernel may read it."""

    def __init__(self, lengths: list[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, idle_lines: int = 2) -> None:
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        num_blocks = sum(counts) + 3
        order = torch.randperm(num_blocks).tolist()
        layer = torch.full((num_blocks, BLOCK_SIZE, 2, num_kv_heads, head_dim), float("nan"))
        tables = torch.full((len(lengths) + idle_lines, max(counts, default=1) + 1), 2**30, dtype=torch.int32)
        lines = torch.randperm(tables.shape[0])[: len(lengths)]
        for line, length, count in zip(lines.tolist(), lengths, counts, strict=True):
            blocks = [order.pop() for _ in range(count)]
            tables[line, :count] = torch.tensor(blocks, dtype=torch.int32)
            for token in range(length):
                layer[blocks[token // BLOCK_SIZE], token % BLOCK_SIZE] = torch.randn(2, num_kv_heads, head_dim)
        self.layer, self.tables = layer.to(device, dtype), tables.to(device)
        self.row_slots = torch.where(torch.tensor(lengths) > 0, lines, -1).to(device, torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.layer, self.tables, self.row_slots, self.lengths


def random_gate(num_tokens: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """A gate as it stands in a wider matrix."""
    return torch.randn(num_tokens, width + 24).to(like)[:, 8 : 8 + width]


def check(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.dtype == expected.dtype
    assert result.isfinite().all()
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads", "splits"), DECODED, ids=str)
def test_decode(triton_device: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, splits: int) -> None:
    cache = Cache([1, 16, 0, 75, 0], num_kv_heads, 32, dtype, triton_device)
    queries = torch.randn(5, num_heads, 32).to(triton_device, dtype)
    gate = random_gate(5, num_heads * 32, queries)
    for optional in (None, gate):
        result = paged_decode(queries, *cache.tensors, 0.3, gate=optional, config=DecodeConfig(32, splits, 4, 2), early=optional is not None)
        check(result, paged_decode_reference(queries, *cache.tensors, 0.3, gate=optional))


@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
def test_head_dims(triton_device: str, head_dim: int) -> None:
    cache = Cache([33, 20], 1, head_dim, torch.float32, triton_device)
    queries = torch.randn(2, 2, head_dim, device=triton_device)
    check(paged_decode(queries, *cache.tensors, head_dim**-0.5), paged_decode_reference(queries, *cache.tensors, head_dim**-0.5))
    queries = torch.randn(12, 2, head_dim, device=triton_device)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32, device=triton_device)
    for splits in (1, 2):
        result = paged_prefill(queries, *cache.tensors, starts, 7, head_dim**-0.5, config=PrefillConfig(16, 16, splits, 4, 1))
        check(result, paged_prefill_reference(queries, *cache.tensors, starts, 7, head_dim**-0.5))


@pytest.mark.parametrize(("window", "splits"), WINDOWED)
def test_window(triton_device: str, window: int, splits: int) -> None:
    cache = Cache([1, 90, 23, 70], 1, 16, torch.float32, triton_device)
    queries = torch.randn(4, 2, 16, device=triton_device)
    result = paged_decode(queries, *cache.tensors, 0.25, window=window, config=DecodeConfig(16, splits, 4, 1))
    check(result, paged_decode_reference(queries, *cache.tensors, 0.25, window=window))
    queries = torch.randn(1 + 20 + 23 + 2, 2, 16, device=triton_device)
    starts = torch.tensor([0, 1, 21, 44, 46], dtype=torch.int32, device=triton_device)
    result = paged_prefill(queries, *cache.tensors, starts, 23, 0.25, window=window, config=PrefillConfig(16, 16, splits, 4, 1))
    check(result, paged_prefill_reference(queries, *cache.tensors, starts, 23, 0.25, window=window))


@pytest.mark.parametrize(
    ("dtype", "num_heads", "num_kv_heads", "splits"),
    [(torch.float32, 3, 1, 3), (torch.float32, 4, 2, 1), (torch.float16, 4, 2, 1), (torch.bfloat16, 2, 2, 1), (torch.bfloat16, 2, 1, 2)],
    ids=str,
)
def test_prefill(triton_device: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, splits: int) -> None:
    """Rows that begin, rows with a cached beginning, and one with a single query."""
    counts, lengths = [20, 1, 9, 16], [20, 50, 60, 16]
    cache = Cache(lengths, num_kv_heads, 32, dtype, triton_device)
    queries = torch.randn(sum(counts), num_heads, 32).to(triton_device, dtype)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=triton_device)
    gate = random_gate(sum(counts), num_heads * 32, queries)
    result = paged_prefill(queries, *cache.tensors, starts, 20, 0.3, gate=gate, config=PrefillConfig(16, 16, splits, 4, 1))
    check(result, paged_prefill_reference(queries, *cache.tensors, starts, 20, 0.3, gate=gate))


@pytest.mark.parametrize("splits", [1, 3])
def test_prefill_of_fewer_rows_and_queries_than_there_is_room_for(triton_device: str, splits: int) -> None:
    cache = Cache([20, 50, 0, 0], 1, 32, torch.float32, triton_device)
    layer, tables, slots, lengths = cache.tensors
    tensors = (layer, tables, torch.where(lengths > 0, slots, -1), lengths)
    queries = torch.randn(40, 2, 32, device=triton_device)
    queries[29:] = float("nan")
    gate = random_gate(40, 64, queries)
    starts = torch.tensor([0, 20, 29, 29, 29], dtype=torch.int32, device=triton_device)
    out = torch.full((40, 64), float("nan"), device=triton_device)
    paged_prefill(queries, *tensors, starts, 40, 0.3, gate=gate, config=PrefillConfig(16, 16, splits, 4, 1), out=out, is_padded=True)
    check(out[:29], paged_prefill_reference(queries[:29], *tensors, starts, 40, 0.3, gate=gate[:29]))
    assert not out[29:].any()


def test_default_configs(triton_device: str) -> None:
    """The cuts chosen by shape, on a strided cache, and with a tile that is larger than a row."""
    cache = Cache([3, 100], 2, 64, torch.float32, triton_device)
    layer = torch.full((cache.layer.shape[0], 2, *cache.layer.shape[1:]), float("nan"), device=triton_device)
    layer[:, 1] = cache.layer
    tensors = (layer[:, 1], *cache.tensors[1:])
    queries = torch.randn(2, 4, 64, device=triton_device)
    check(paged_decode(queries, *tensors, 0.125), paged_decode_reference(queries, *tensors, 0.125))
    queries = torch.randn(38, 4, 64, device=triton_device)
    starts = torch.tensor([0, 3, 38], dtype=torch.int32, device=triton_device)
    check(paged_prefill(queries, *tensors, starts, 35, 0.125), paged_prefill_reference(queries, *tensors, starts, 35, 0.125))


def test_large_scores(triton_device: str) -> None:
    """Scores far beyond what exp can take: the running maximum keeps them in range, in one split and between splits."""
    cache = Cache([70], 1, 16, torch.float32, triton_device)
    queries = torch.randn(1, 2, 16, device=triton_device) * 100
    for splits in (1, 4):
        result = paged_decode(queries, *cache.tensors, 10.0, config=DecodeConfig(16, splits, 4, 1))
        check(result, paged_decode_reference(queries, *cache.tensors, 10.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 256), (torch.float16, 128), (torch.bfloat16, 64), (torch.float16, 16), (torch.bfloat16, 16), (torch.float32, 128)],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 700])
def test_on_a_gpu(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    """Shapes of real models, with the cuts chosen for the device, and some others that fit its shared memory: each takes seconds to compile."""
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the GPU has no bfloat16")
    lengths, counts = [2049, 517, 3, 1000], [700, 517, 1, 30]
    cache = Cache(lengths, 4, head_dim, dtype, "cuda")
    scale = head_dim**-0.5
    decode_queries = torch.randn(4, 16, head_dim).to("cuda", dtype)
    decode_gate = random_gate(4, 16 * head_dim, decode_queries)
    decoded = paged_decode_reference(decode_queries, *cache.tensors, scale, window, decode_gate)
    queries = torch.randn(sum(counts), 16, head_dim).to("cuda", dtype)
    gate = random_gate(sum(counts), 16 * head_dim, queries)
    starts = torch.tensor([0, 700, 1217, 1218, 1248], dtype=torch.int32, device="cuda")
    prefilled = paged_prefill_reference(queries, *cache.tensors, starts, 700, scale, window, gate)
    check(paged_decode(decode_queries, *cache.tensors, scale, window, decode_gate), decoded)
    check(paged_prefill(queries, *cache.tensors, starts, 700, scale, window, gate), prefilled)
    if head_dim == 256 and window is None:
        limit = driver.active.utils.get_device_properties(0)["max_shared_mem"]
        for config in decode_candidates()[::41]:
            if config.shared_bytes(queries) <= limit:
                check(paged_decode(decode_queries, *cache.tensors, scale, window, decode_gate, config), decoded)
        for prefill in prefill_candidates()[::11]:
            if prefill.shared_bytes(queries) <= limit:
                check(paged_prefill(queries, *cache.tensors, starts, 700, scale, window, gate, prefill), prefilled)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_decode_in_a_graph() -> None:
    """One graph serves rows that grow, come and go."""
    cache = Cache([300, 40], 2, 128, torch.float16, "cuda")
    queries = torch.randn(2, 8, 128, device="cuda", dtype=torch.float16)
    layer, tables, row_slots, lengths = cache.tensors
    paged_decode(queries, *cache.tensors, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = paged_decode(queries, layer, tables, row_slots, lengths, 0.1)
    for now in ([300, 40], [1, 39], [150, 0]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        queries.normal_()
        graph.replay()
        check(result, paged_decode_reference(queries, layer, tables, row_slots, lengths, 0.1))
