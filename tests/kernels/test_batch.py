"""Batches of scheduled rows, and paged attention over them against dense float32 attention."""

from __future__ import annotations

import pytest
import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.batch import Batch, build_batch
from pocketllm.torch_engine.layers.attention import KVCache, paged_attention
from pocketllm.torch_engine.scheduler import Row, ScheduledRow

BLOCK_SIZE, HEAD_DIM, NUM_BLOCKS = 4, 16, 32
NEIGHBOURS, SCATTERED = "neighbours", "scattered"


def scheduled(table: list[int], computed: int, num_tokens: int, ahead: int = 0) -> ScheduledRow:
    """A row with `ahead` tokens after those of this step; token i has the id 100 * first block + i."""
    length = computed + num_tokens + ahead
    row = Row(EngineRequest(f"row {table[0]}", tuple(100 * table[0] + place for place in range(length)), 8))
    row.block_table, row.num_computed_tokens = table, computed
    return ScheduledRow(row, num_tokens, ahead == 0)


def build(*step: ScheduledRow) -> Batch:
    return build_batch(step, BLOCK_SIZE, torch.float32)


def test_a_prompt_from_its_beginning() -> None:
    batch = build(scheduled([5, 6], 0, 6))
    assert batch.token_ids.tolist() == [500, 501, 502, 503, 504, 505]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.slot_mapping.tolist() == [20, 21, 22, 23, 24, 25]
    assert {tensor.dtype for tensor in (batch.token_ids, batch.positions, batch.slot_mapping, batch.sample_index)} == {torch.int64}
    assert batch.num_decode == 0
    (prefill,) = batch.prefills
    assert (prefill.tokens, prefill.blocks, prefill.length, prefill.mask) == (slice(0, 6), slice(5, 7), 6, None)
    assert batch.sample_index.tolist() == [5]


def test_a_piece_of_a_prompt_masks_what_is_ahead() -> None:
    batch = build(scheduled([9, 2, 3], 3, 3, ahead=4))
    assert batch.positions.tolist() == [3, 4, 5]
    assert batch.slot_mapping.tolist() == [39, 8, 9]
    (prefill,) = batch.prefills
    assert isinstance(prefill.blocks, torch.Tensor)
    assert prefill.blocks.tolist() == [9, 2], "only blocks that hold something by now"
    assert prefill.length == 6
    assert prefill.mask is not None
    inf = float("inf")
    assert prefill.mask.tolist() == [[0, 0, 0, 0, -inf, -inf], [0, 0, 0, 0, 0, -inf], [0, 0, 0, 0, 0, 0]]
    assert batch.sample_index.tolist() == []
    assert batch.sampling == []


def test_one_decoding_row_needs_no_mask() -> None:
    batch = build(scheduled([3, 4, 5], 9, 1))
    assert (batch.num_decode, batch.decode_blocks, batch.decode_lengths.tolist(), batch.decode_mask) == (1, slice(3, 6), [10], None)
    assert batch.slot_mapping.tolist() == [5 * 4 + 1]


def test_one_decoding_row_in_scattered_blocks() -> None:
    batch = build(scheduled([3, 5, 4], 9, 1))
    assert isinstance(batch.decode_blocks, torch.Tensor)
    assert batch.decode_blocks.tolist() == [3, 5, 4]


def test_decode_tables_are_padded_with_blocks_of_the_row() -> None:
    batch = build(scheduled([3], 1, 1), scheduled([7, 8, 9], 9, 1))
    assert isinstance(batch.decode_blocks, torch.Tensor)
    assert batch.decode_blocks.tolist() == [3, 3, 3, 7, 8, 9]
    assert batch.decode_lengths.tolist() == [2, 10]
    assert batch.decode_mask is not None
    assert batch.decode_mask.shape == (2, 1, 1, 12)
    seen = (batch.decode_mask == 0).sum(-1).flatten()
    assert seen.tolist() == [2, 10]
    assert (batch.decode_mask[0, 0, 0, 2:] == float("-inf")).all()


def test_blocks_that_hold_nothing_yet_are_left_out() -> None:
    batch = build(scheduled([3, 4, 5], 2, 1), scheduled([7, 8, 9], 3, 1))
    assert isinstance(batch.decode_blocks, torch.Tensor)
    assert batch.decode_blocks.tolist() == [3, 7]


def test_decoding_rows_stand_first_and_sampling_rows_are_named() -> None:
    prompt, decoding, piece, last = scheduled([1, 2], 0, 5), scheduled([4], 2, 1), scheduled([6, 7], 0, 6, ahead=2), scheduled([8], 3, 1)
    batch = build(prompt, decoding, piece, last)
    assert batch.num_decode == 2
    assert batch.token_ids.tolist()[:2] == [402, 803]
    assert [prefill.tokens for prefill in batch.prefills] == [slice(2, 7), slice(7, 13)]
    assert batch.sampling == [decoding, last, prompt]
    assert batch.sample_index.tolist() == [0, 1, 6]


def test_a_piece_of_one_token_is_a_decode_that_does_not_sample() -> None:
    batch = build(scheduled([1, 2], 4, 1, ahead=2), scheduled([4], 0, 1))
    assert batch.num_decode == 2
    assert batch.sample_index.tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_have_the_dtype_asked_for(dtype: torch.dtype) -> None:
    batch = build_batch([scheduled([1], 0, 1), scheduled([2], 1, 1), scheduled([4, 5], 4, 3)], BLOCK_SIZE, dtype)
    assert batch.decode_mask is not None
    assert batch.prefills[0].mask is not None
    assert batch.decode_mask.dtype == batch.prefills[0].mask.dtype == dtype


class Dense:
    """Rows with random keys, values and queries, in a paged cache and as plain tensors."""

    def __init__(self, tables: list[list[int]], lengths: list[int], num_heads: int, num_kv_heads: int, dtype: torch.dtype = torch.float32) -> None:
        self.num_heads, self.group = num_heads, num_heads // num_kv_heads
        self.cache = KVCache(2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, HEAD_DIM, dtype)
        garbage = torch.randn(NUM_BLOCKS * BLOCK_SIZE, num_kv_heads, HEAD_DIM).to(dtype)  # what earlier rows left in the slots
        self.cache.write(1, torch.arange(NUM_BLOCKS * BLOCK_SIZE), garbage * 100, garbage * 100)
        self.tables = tables
        self.keys = [torch.randn(length, num_kv_heads, HEAD_DIM).to(dtype) for length in lengths]
        self.values = [torch.randn(length, num_kv_heads, HEAD_DIM).to(dtype) for length in lengths]
        self.queries = [torch.randn(length, num_heads, HEAD_DIM).to(dtype) for length in lengths]

    def step(self, row_counts: list[tuple[int, int, int]], window: int | None = None) -> list[torch.Tensor]:
        """One step of [(row, computed, num_tokens)]; the attention of each row's tokens, in that order."""
        step = [scheduled(self.tables[row], computed, count) for row, computed, count in row_counts]
        batch = build_batch(step, BLOCK_SIZE, self.cache.dtype)
        order = [entry for entry in row_counts if entry[2] == 1] + [entry for entry in row_counts if entry[2] != 1]

        def gather(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([tensors[row][computed : computed + count] for row, computed, count in order])

        self.cache.write(1, batch.slot_mapping, gather(self.keys), gather(self.values))
        parts = paged_attention(gather(self.queries), self.cache, 1, batch, window=window).split([count for _, _, count in order])
        return [parts[order.index(entry)] for entry in row_counts]

    def expected(self, row: int, start: int, end: int, window: int | None = None) -> torch.Tensor:
        """Dense float32 attention of tokens [start, end) to those up to each, of them to the last `window`."""
        keys = self.keys[row][:end].float().repeat_interleave(self.group, dim=1)
        values = self.values[row][:end].float().repeat_interleave(self.group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", self.queries[row][start:end].float(), keys) / HEAD_DIM**0.5
        behind = torch.arange(start, end).unsqueeze(1) - torch.arange(end)
        ahead = (behind < 0) | (behind >= (window or end))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, float("-inf")).softmax(-1), values).flatten(1)

    def forget(self, window: int, computed: list[int]) -> None:
        """Spoil what has left the window of each row's next token."""
        for table, count in zip(self.tables, computed, strict=True):
            places = range(max(0, count + 1 - window))
            slots = torch.tensor([table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places], dtype=torch.int64)
            for blocks in self.cache.blocks:
                blocks.flatten(0, 1)[slots] = 1e4


LAYOUTS = {NEIGHBOURS: [[4, 5, 6, 7], [10, 11, 12, 13, 14], [20]], SCATTERED: [[7, 4, 30, 5], [12, 2, 14, 10, 11], [20]]}
LENGTHS = [14, 18, 3]


@pytest.mark.parametrize("layout", [NEIGHBOURS, SCATTERED])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_ragged_rows_through_prefill_chunks_and_decode(layout: str, num_heads: int, num_kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    rows = Dense(LAYOUTS[layout], LENGTHS, num_heads, num_kv_heads, dtype)
    steps = [
        [(0, 0, 5)],
        [(0, 5, 1), (1, 0, 7)],
        [(0, 6, 1), (1, 7, 6), (2, 0, 2)],
        [(2, 2, 1), (0, 7, 1), (1, 13, 1)],
        [(0, 8, 5), (1, 14, 1)],
        [(1, 15, 3), (0, 13, 1)],
    ]
    for step in steps:
        for (row, computed, count), found in zip(step, rows.step(step), strict=True):
            assert found.dtype == dtype
            torch.testing.assert_close(found.float(), rows.expected(row, computed, computed + count), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", [NEIGHBOURS, SCATTERED])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 9, 50])
def test_a_window(layout: str, window: int) -> None:
    rows = Dense(LAYOUTS[layout], LENGTHS, 6, 2)
    steps = [[(0, 0, 11)], [(0, 11, 1), (1, 0, 3)], [(1, 3, 10), (2, 0, 2)], [(2, 2, 1), (0, 12, 1), (1, 13, 1)], [(1, 14, 1)], [(1, 15, 3), (0, 13, 1)]]
    computed = [0, 0, 0]
    for step in steps:
        rows.forget(window, computed)
        for (row, start, count), found in zip(step, rows.step(step, window), strict=True):
            torch.testing.assert_close(found, rows.expected(row, start, start + count, window), rtol=2e-6, atol=2e-6)
            computed[row] = start + count


def test_a_prompt_longer_than_its_window_comes_in_pieces() -> None:
    torch.manual_seed(3)
    rows = Dense([list(range(8, 8 + 21)), list(range(1, 7))], [84, 24], 4, 2)
    for window in (6, 70):
        batch = build(scheduled(rows.tables[0], 0, 84))
        pieces = batch.windowed_prefills(window)
        assert sum(piece.tokens.stop - piece.tokens.start for piece in pieces) == 84
        assert len(pieces) == 2
        assert max(piece.length for piece in pieces) <= 64 + window + BLOCK_SIZE, "no piece reads more than its windows and its tokens"
        torch.testing.assert_close(rows.step([(0, 0, 84)], window)[0], rows.expected(0, 0, 84, window), rtol=3e-6, atol=3e-6)


def test_attention_takes_a_scale_of_its_own() -> None:
    rows = Dense([[4, 5]], [6], 4, 2)
    before = rows.step([(0, 0, 6)])[0]
    batch = build(scheduled([4, 5], 0, 6))
    scaled = paged_attention(torch.cat([rows.queries[0]]) * 2, rows.cache, 1, batch, scale=HEAD_DIM**-0.5 / 2)
    torch.testing.assert_close(scaled, before)


def test_neighbouring_and_scattered_blocks_give_the_same() -> None:
    results = []
    for layout in (NEIGHBOURS, SCATTERED):
        torch.manual_seed(1)
        rows = Dense(LAYOUTS[layout], LENGTHS, 6, 2)
        results.append(rows.step([(0, 0, 14)]) + rows.step([(1, 0, 17)]) + rows.step([(1, 17, 1)]))
    for near, far in zip(*results, strict=True):
        torch.testing.assert_close(near, far, rtol=1e-6, atol=1e-6)


def test_a_cached_prefix_is_read_from_the_blocks_of_another_row() -> None:
    rows = Dense([[4, 5, 6], [4, 5, 9]], [12, 12], 6, 2)
    for tensors in (rows.keys, rows.values):
        tensors[1][:8] = tensors[0][:8]
    rows.step([(0, 0, 12)])
    (found,) = rows.step([(1, 8, 4)])
    torch.testing.assert_close(found, rows.expected(1, 8, 12), rtol=2e-6, atol=2e-6)


def test_layers_do_not_mix() -> None:
    cache = KVCache(2, 4, BLOCK_SIZE, 1, HEAD_DIM, torch.float32)
    cache.write(0, torch.tensor([5]), torch.ones(1, 1, HEAD_DIM), torch.full((1, 1, HEAD_DIM), 2.0))
    keys, values = cache.read(0, slice(1, 2), 1)
    assert keys.shape == (1, 1, BLOCK_SIZE, HEAD_DIM)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 0, 0]
    assert values[0, 0, :, 0].tolist() == [0, 2, 0, 0]
    assert cache.read(1, slice(0, 4), 1)[0].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cache_counts_its_bytes(dtype: torch.dtype) -> None:
    cache = KVCache(3, 5, BLOCK_SIZE, 2, HEAD_DIM, dtype)
    assert cache.num_bytes == 3 * 5 * BLOCK_SIZE * 2 * 2 * HEAD_DIM * dtype.itemsize
    assert cache.dtype == dtype
