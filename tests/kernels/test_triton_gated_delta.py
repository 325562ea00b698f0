"""Gated DeltaNet's Triton kernels against torch's float32, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.torch_engine.kernels.causal_conv import conv_prefill
from pocketllm.torch_engine.kernels.chunk_plan import ChunkPlan
from pocketllm.torch_engine.kernels.delta_chunks import ChunkConfig
from pocketllm.torch_engine.kernels.delta_scan import scanned_rule
from pocketllm.torch_engine.kernels.gated_delta import delta_decode, delta_prefill, gated_delta_reference
from pocketllm.torch_engine.layers.gated_delta_net import DeltaNetSizes

SIZES = DeltaNetSizes(num_key_heads=2, num_value_heads=4, key_dim=32, value_dim=16, conv_kernel=4)
TILED = DeltaNetSizes(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32, conv_kernel=4, tiled=True)
ODD = DeltaNetSizes(num_key_heads=1, num_value_heads=3, key_dim=20, value_dim=12, conv_kernel=3)
ONE_TO_ONE = DeltaNetSizes(num_key_heads=2, num_value_heads=2, key_dim=16, value_dim=16, conv_kernel=2)
CHUNKED = ChunkConfig()
EPS = 1e-6
NUM_SLOTS = 6
HALF = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # error of all values together, beside their size: a norm makes much of a small value's


@dataclass
class Layer:
    """Random weights and caches of one layer, on one device."""

    sizes: DeltaNetSizes
    device: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        sizes = self.sizes
        heads = sizes.num_value_heads
        self.weights = (
            self.normal(sizes.conv_kernel, sizes.conv_dim),
            -self.normal(heads).exp() / 4,
            self.normal(heads),
            self.normal(sizes.value_dim),
            EPS,
            sizes,
        )
        self.conv = self.normal(NUM_SLOTS, sizes.conv_kernel, sizes.conv_dim)
        self.recurrent = self.normal(NUM_SLOTS, heads, sizes.key_dim, sizes.value_dim) / 4

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def mixed(self, num_tokens: int) -> torch.Tensor:
        """What in_proj gives, as columns of a wider matrix."""
        width = self.sizes.conv_dim + self.sizes.value_size + 2 * self.sizes.num_value_heads
        return self.normal(num_tokens, width + 5).to(self.dtype)[:, :width]

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def plan(self, lengths: tuple[int, ...]) -> ChunkPlan:
        return ChunkPlan.of(lengths, torch.device(self.device))

    def reference(
        self, mixed: torch.Tensor, conv: torch.Tensor, recurrent: torch.Tensor, slots: list[int], positions: list[int], lengths: tuple[int, ...]
    ) -> torch.Tensor:
        return gated_delta_reference(mixed.cpu(), conv, recurrent, self.ints(slots).cpu(), self.ints(positions).cpu(), lengths, *self.cpu_weights)

    @property
    def cpu_weights(self) -> tuple[object, ...]:
        return tuple(weight.cpu() if isinstance(weight, torch.Tensor) else weight for weight in self.weights)

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.conv.cpu().clone(), self.recurrent.cpu().clone()

    def check(self, out: torch.Tensor, wanted: torch.Tensor, conv: torch.Tensor, recurrent: torch.Tensor) -> None:
        assert out.dtype == self.dtype
        for have, want in ((out.float().cpu(), wanted), (self.recurrent.cpu(), recurrent)):
            if self.dtype == torch.float32:
                torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
            else:
                assert (have - want).norm() < HALF[self.dtype] * want.norm()
                torch.testing.assert_close(have, want, rtol=0.0, atol=20 * HALF[self.dtype])
        assert torch.equal(self.conv.cpu(), conv)


ALL_SIZES = {"grouped": SIZES, "tiled": TILED, "odd": ODD, "one_to_one": ONE_TO_ONE}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = ((1,), (2,), (64,), (3, 65, 1, 130), (63, 128))
# Triton's interpreter takes seconds for what a GPU does at once, and has one way of doing it: there, one case of each kind
IS_GPU = torch.cuda.is_available()


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in ALL_SIZES for dtype in DTYPES if IS_GPU or dtype == torch.float32 or name == "odd"], ids=str
)
def test_decode(triton_device: str, name: str, dtype: torch.dtype) -> None:
    sizes = ALL_SIZES[name]
    layer = Layer(sizes, triton_device, dtype)
    conv, recurrent = layer.caches()
    slots = [4, -1, 0, 2, -1] if IS_GPU else [4, -1, 0]
    for step in range(sizes.conv_kernel + 2):  # every place of the ring, wrapped around, rows at different places
        positions = [step, 0, step + 1, step + 100, 0][: len(slots)]
        mixed = layer.mixed(len(slots))
        wanted = layer.reference(mixed, conv, recurrent, slots, positions, (1,) * len(slots))
        out = delta_decode(mixed, layer.conv, layer.recurrent, layer.ints(slots), layer.ints(positions), *layer.weights)
        layer.check(out, wanted, conv, recurrent)
        assert not out[1].any()


@pytest.mark.parametrize(("value_dim", "split"), [(16, 2), (20, 4), (128, None)] if IS_GPU else [(20, 4), (128, None)])
def test_decode_with_heads_shared_between_programs(triton_device: str, value_dim: int, split: int | None) -> None:
    sizes = DeltaNetSizes(1, 2, 32, value_dim, 4)
    layer = Layer(sizes, triton_device, torch.float32)
    conv, recurrent = layer.caches()
    for step in range(2):  # the tickets are left as they were
        positions = [step + 9, 0, step]
        mixed = layer.mixed(3)
        wanted = layer.reference(mixed, conv, recurrent, [1, -1, 3], positions, (1, 1, 1))
        out = delta_decode(mixed, layer.conv, layer.recurrent, layer.ints([1, -1, 3]), layer.ints(positions), *layer.weights, split=split)
        layer.check(out, wanted, conv, recurrent)


def test_one_chunk_in_flight_is_refused() -> None:
    with pytest.raises(ValueError, match="states_stages is at least 2, not 1"):
        ChunkConfig(states_stages=1)


def test_decode_reads_early_what_earlier_steps_wrote(triton_device: str) -> None:
    layer = Layer(ODD, triton_device, torch.float32)
    conv, recurrent = layer.caches()
    for step in range(2):
        mixed = layer.mixed(3)
        wanted = layer.reference(mixed, conv, recurrent, [2, -1, 5], [step, 0, step + 7], (1, 1, 1))
        out = delta_decode(mixed, layer.conv, layer.recurrent, layer.ints([2, -1, 5]), layer.ints([step, 0, step + 7]), *layer.weights, early=True)
        layer.check(out, wanted, conv, recurrent)


def test_decode_into_part_of_a_matrix(triton_device: str) -> None:
    layer = Layer(SIZES, triton_device, torch.float32)
    conv, recurrent = layer.caches()
    mixed = layer.mixed(2)
    wanted = layer.reference(mixed, conv, recurrent, [1, 3], [7, 8], (1, 1))
    whole = torch.full((4, SIZES.value_size + 3), 7.0, device=triton_device)
    part = whole[1:3, : SIZES.value_size]
    out = delta_decode(mixed, layer.conv, layer.recurrent, layer.ints([1, 3]), layer.ints([7, 8]), *layer.weights, out=part)
    assert out is part
    layer.check(part, wanted, conv, recurrent)
    assert (whole[[0, 3]] == 7).all()
    assert (whole[:, SIZES.value_size :] == 7).all()


def test_a_row_without_a_slot_reads_nothing_that_is_not_finite(triton_device: str) -> None:
    layer = Layer(SIZES, triton_device, torch.float32)
    layer.recurrent[0] = float("nan")
    mixed = layer.mixed(2)
    mixed[0] = float("inf")
    out = delta_decode(mixed, layer.conv, layer.recurrent, layer.ints([-1, 1]), layer.ints([0, 5]), *layer.weights)
    assert not out[0].any()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("name", ALL_SIZES)
@pytest.mark.parametrize("lengths", LENGTHS if IS_GPU else [(3, 65, 1)], ids=str)
def test_prefill(triton_device: str, name: str, lengths: tuple[int, ...]) -> None:
    check_prefill(Layer(ALL_SIZES[name], triton_device, torch.float32), lengths)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_prefill_of_other_lengths(triton_device: str, lengths: tuple[int, ...]) -> None:
    check_prefill(Layer(ONE_TO_ONE, triton_device, torch.float32), lengths)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in ALL_SIZES for dtype in DTYPES[1:] if IS_GPU or (name, dtype) in (("tiled", DTYPES[1]), ("odd", DTYPES[2]))],
    ids=str,
)
def test_prefill_in_half_precision(triton_device: str, name: str, dtype: torch.dtype) -> None:
    check_prefill(Layer(ALL_SIZES[name], triton_device, dtype), (70, 2, 129) if IS_GPU else (70, 2))


@pytest.mark.parametrize("name", ALL_SIZES if IS_GPU else ["tiled", "odd"])
def test_prefill_token_by_token(triton_device: str, name: str) -> None:
    check_prefill(Layer(ALL_SIZES[name], triton_device, torch.float32), (3, 1, 20), config=None)


def test_prefill_token_by_token_in_half_precision(triton_device: str) -> None:
    """What a GPU without tensor cores that Triton uses does."""
    layer = Layer(SIZES, triton_device, torch.float16)
    conv, recurrent = layer.caches()
    mixed, positions = layer.mixed(20), list(range(20))
    wanted = layer.reference(mixed, conv, recurrent, [2], positions, (20,))
    plan = ChunkPlan.of((20,), mixed.device)
    heads = conv_prefill(mixed, layer.conv, layer.ints([2]), layer.ints(positions), layer.weights[0], SIZES, plan)
    out = mixed.new_empty(20, SIZES.value_size)
    scanned_rule(*heads, mixed, layer.recurrent, layer.ints([2]), *layer.weights[1:], plan, out)
    layer.check(out, wanted, conv, recurrent)


def check_prefill(layer: Layer, lengths: tuple[int, ...], config: ChunkConfig | None = CHUNKED) -> None:
    """Rows that begin, rows whose ring is partly from before, rows far into their context."""
    conv, recurrent = layer.caches()
    slots, firsts = [3, 0, 5, 1][: len(lengths)], [0, 2, 77, 4096][: len(lengths)]
    positions = [first + place for first, length in zip(firsts, lengths, strict=True) for place in range(length)]
    mixed = layer.mixed(sum(lengths))
    wanted = layer.reference(mixed, conv, recurrent, slots, positions, lengths)
    out = delta_prefill(mixed, layer.conv, layer.recurrent, layer.ints(slots), layer.ints(positions), layer.plan(lengths), *layer.weights, config=config)
    layer.check(out, wanted, conv, recurrent)


@pytest.mark.parametrize("config", [CHUNKED, None], ids=["chunked", "scanned"])
def test_prefill_in_a_plan_that_holds_more(triton_device: str, config: ChunkConfig | None) -> None:
    """Rows without tokens, chunks of no row, and tokens of no row, however wild."""
    layer = Layer(SIZES, triton_device, torch.float32)
    conv, recurrent = layer.caches()
    lengths, positions = (3, 65), [*range(7, 10), *range(65), 0, 0, 0]
    mixed = layer.mixed(71)
    mixed[68:] = float("nan")
    wanted = layer.reference(mixed[:68], conv, recurrent, [4, 1], positions, lengths)
    plan = ChunkPlan(layer.ints([0, 3, 68, 68, 68]), layer.ints([0, 1, 3, 3, 3]), layer.ints([0, 1, 1, -1, -1]))
    out = torch.full((71, SIZES.value_size), 7.0, device=triton_device)
    delta_prefill(mixed, layer.conv, layer.recurrent, layer.ints([4, 1, -1, -1]), layer.ints(positions), plan, *layer.weights, out=out, config=config)
    layer.check(out[:68], wanted, conv, recurrent)
    assert (out[68:] == 7).all()


def test_prefill_in_pieces_then_decode_is_one_prefill(triton_device: str) -> None:
    whole, pieces = (Layer(SIZES, triton_device, torch.float32) for _ in range(2))
    mixed = whole.mixed(80)
    positions = whole.ints(list(range(80)))
    wanted = delta_prefill(mixed, whole.conv, whole.recurrent, whole.ints([2]), positions, whole.plan((80,)), *whole.weights, config=CHUNKED)
    out, start = [], 0
    for length in (1, 66, 2, 10):
        part = slice(start, start + length)
        caches = pieces.conv, pieces.recurrent, pieces.ints([2])
        out.append(delta_prefill(mixed[part], *caches, positions[part], pieces.plan((length,)), *pieces.weights, config=CHUNKED))
        start += length
    out.append(delta_decode(mixed[start:], pieces.conv, pieces.recurrent, pieces.ints([2]), positions[start:], *pieces.weights))
    torch.testing.assert_close(torch.cat(out), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pieces.recurrent, whole.recurrent, rtol=1e-4, atol=1e-5)
    assert torch.equal(pieces.conv, whole.conv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_of_tokens_that_are_all_the_same(triton_device: str, dtype: torch.dtype) -> None:
    """Keys that repeat make the chunk's system as hard as it gets: nothing may grow."""
    layer = Layer(SIZES, triton_device, dtype)
    conv, recurrent = layer.caches()
    mixed = layer.mixed(1).expand(128, -1).contiguous()
    mixed[:, -2 * SIZES.num_value_heads : -SIZES.num_value_heads] = 6.0  # beta near 1
    mixed[:, -SIZES.num_value_heads :] = -8.0  # hardly any decay
    wanted = layer.reference(mixed, conv, recurrent, [1], list(range(128)), (128,))
    out = delta_prefill(mixed, layer.conv, layer.recurrent, layer.ints([1]), layer.ints(list(range(128))), layer.plan((128,)), *layer.weights, config=CHUNKED)
    layer.check(out, wanted, conv, recurrent)


def test_strong_decay_neither_overflows_nor_leaves_nan(triton_device: str) -> None:
    layer = Layer(SIZES, triton_device, torch.float32)
    conv, recurrent = layer.caches()
    mixed = layer.mixed(100)
    mixed[:, -SIZES.num_value_heads :] = 500.0
    wanted = layer.reference(mixed, conv, recurrent, [1], list(range(100)), (100,))
    out = delta_prefill(mixed, layer.conv, layer.recurrent, layer.ints([1]), layer.ints(list(range(100))), layer.plan((100,)), *layer.weights, config=CHUNKED)
    layer.check(out, wanted, conv, recurrent)


def test_launch_sizes_do_not_change_the_result(triton_device: str) -> None:
    results = []
    for values in (32, 64):
        layer = Layer(DeltaNetSizes(1, 2, 16, 64, 4), triton_device, torch.float32)
        mixed = layer.mixed(100)
        config = ChunkConfig(states_values=values)
        where = layer.conv, layer.recurrent, layer.ints([1]), layer.ints(list(range(100))), layer.plan((100,))
        results.append(delta_prefill(mixed, *where, *layer.weights, config=config))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
