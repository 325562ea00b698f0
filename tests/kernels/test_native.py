"""The native decode step against the same arithmetic written out in float64."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from pocketllm.torch_engine.kernels import native
from pocketllm.torch_engine.kernels.native import DecodeLayer, DecodeStep, Q4Linear, Team, library, pack_q4, pack_q8, unsuited
from pocketllm.torch_engine.layers.rope import RotaryEmbedding
from pocketllm.torch_engine.weights import StoredTensor

HEADS, KV_HEADS, DIM, HIDDEN, FFN, VOCAB, LAYERS, BLOCK_SIZE, EPS = 6, 2, 32, 64, 96, 80, 3, 4, 1e-5
needs_library = pytest.mark.skipif(isinstance(library(), str), reason="the native library is not built here, or the processor has no AVX-512")


def matrix(rng: np.random.Generator, tensor_type: str, rows: int, columns: int) -> StoredTensor:
    values = rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
    blocks = gguf.quantize(values, gguf.GGMLQuantizationType[tensor_type])
    return StoredTensor(f"{tensor_type}[{rows}, {columns}]", tensor_type, (rows, columns), blocks, None)


@dataclass
class Layer:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: list[StoredTensor]
    output: StoredTensor
    gate_up: list[StoredTensor]
    down: StoredTensor

    def packed(self) -> DecodeLayer:
        norms = (self.input_norm.numpy(), self.post_norm.numpy())
        return DecodeLayer(*norms, pack_q4(self.qkv), pack_q4([self.output]), pack_q4(self.gate_up), pack_q4([self.down]))


class Model:
    def __init__(self, tensor_type: str, num_threads: int) -> None:
        rng = np.random.default_rng(7)

        def norm() -> torch.Tensor:
            return torch.from_numpy(rng.normal(1, 0.2, HIDDEN).astype(np.float32))

        def q4(rows: int, columns: int) -> StoredTensor:
            return matrix(rng, tensor_type, rows, columns)

        self.layers = [
            Layer(
                norm(),
                norm(),
                [q4(HEADS * DIM, HIDDEN), q4(KV_HEADS * DIM, HIDDEN), q4(KV_HEADS * DIM, HIDDEN)],
                q4(HIDDEN, HEADS * DIM),
                [q4(FFN, HIDDEN), q4(FFN, HIDDEN)],
                q4(HIDDEN, FFN),
            )
            for _ in range(LAYERS)
        ]
        self.norm = norm()
        self.head = matrix(rng, "Q8_0", VOCAB, HIDDEN)
        self.rope = RotaryEmbedding(DIM, 10000.0, 512)
        self.step = DecodeStep(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            intermediate_size=FFN,
            rms_norm_eps=EPS,
            layers=[layer.packed() for layer in self.layers],
            norm=self.norm.numpy(),
            head=pack_q8(self.head),
            team=Team(num_threads),
        )

    def reference(self, x: torch.Tensor, position: int, table: list[int], cache: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """One row's hidden state and logits in float64; its keys and values, rounded to float16, go to `cache`."""

        def weight(tensors: list[StoredTensor]) -> torch.Tensor:
            return torch.cat([tensor.float() for tensor in tensors]).double()

        def rms(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return x / (x.square().mean() + EPS).sqrt() * scale.double()

        cos, sin = (table.double()[0, 0] for table in self.rope.at(torch.tensor([position])))

        def turn(heads: torch.Tensor) -> torch.Tensor:
            a, b = heads.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        x = x.double()
        for layer, blocks in zip(self.layers, cache, strict=True):
            heads = (weight(layer.qkv) @ rms(x, layer.input_norm)).view(-1, DIM)
            query, key, value = turn(heads[:HEADS]), turn(heads[HEADS : HEADS + KV_HEADS]), heads[HEADS + KV_HEADS :]
            blocks[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = torch.stack([key, value]).half()
            seen = blocks[torch.tensor(table)].flatten(0, 1)[: position + 1].double()  # [tokens, 2, KV_HEADS, DIM]
            keys, values = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (seen[:, 0], seen[:, 1]))
            scores = torch.einsum("hd,thd->ht", query, keys) * DIM**-0.5
            x = x + weight([layer.output]) @ torch.einsum("ht,thd->hd", scores.softmax(-1), values).flatten()
            gate, up = (weight(layer.gate_up) @ rms(x, layer.post_norm)).chunk(2)
            x = x + weight([layer.down]) @ (gate * gate.sigmoid() * up)
        return x, weight([self.head]) @ rms(x, self.norm)


def new_cache() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(24, BLOCK_SIZE, 2, KV_HEADS, DIM, generator=generator).half() for _ in range(LAYERS)]


def run(model: Model, hidden: torch.Tensor, positions: list[int], tables: list[list[int]], cache: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = hidden.clone()
    cos, sin = model.rope.at(torch.tensor(positions))
    model.step.layers(hidden, cos[:, 0], sin[:, 0], torch.tensor(tables), torch.tensor(positions) + 1, cache)
    return hidden, model.step.logits(hidden)


POSITIONS = [0, 3, 4, 17, 19, 9, 1]
TABLES = [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [2, 3, 2, 2, 2], [8, 7, 6, 5, 4], [9, 11, 10, 13, 12], [14, 15, 16, 14, 14], [17, 17, 17, 17, 17]]


@needs_library
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q4_1"])
def test_ragged_rows_against_float64(tensor_type: str, num_threads: int) -> None:
    model = Model(tensor_type, num_threads)
    hidden = torch.randn(len(POSITIONS), HIDDEN, generator=torch.Generator().manual_seed(1))
    cache, expected_cache = new_cache(), new_cache()
    states, logits = run(model, hidden, POSITIONS, TABLES, cache)
    for row, (position, table) in enumerate(zip(POSITIONS, TABLES, strict=True)):
        state, expected = model.reference(hidden[row], position, table, expected_cache)
        torch.testing.assert_close(states[row].double(), state, rtol=2e-4, atol=2e-4)  # a key may round to the other float16 neighbour
        torch.testing.assert_close(logits[row].double(), expected, rtol=2e-4, atol=2e-4)
    for stored, expected in zip(cache, expected_cache, strict=True):
        torch.testing.assert_close(stored.double(), expected.double(), rtol=2**-10, atol=1e-5)


@needs_library
def test_a_row_is_the_same_to_the_bit_in_every_batch_and_team() -> None:
    hidden = torch.randn(len(POSITIONS), HIDDEN, generator=torch.Generator().manual_seed(1))
    states, logits = run(Model("Q4_1", 2), hidden, POSITIONS, TABLES, new_cache())
    for num_threads in (1, 2):
        model = Model("Q4_1", num_threads)
        for row in range(len(POSITIONS)):
            alone = run(model, hidden[row : row + 1], POSITIONS[row : row + 1], TABLES[row : row + 1], new_cache())
            assert torch.equal(alone[0][0], states[row])
            assert torch.equal(alone[1][0], logits[row])


@needs_library
def test_a_long_row_and_steps_one_after_another() -> None:
    model = Model("Q4_1", 2)
    generator = torch.Generator().manual_seed(5)
    cache, expected_cache = new_cache(), new_cache()
    table = list(range(20))
    for position in range(70):
        hidden = torch.randn(1, HIDDEN, generator=generator)
        states, _ = run(model, hidden, [position], [table], cache)
        state, _ = model.reference(hidden[0], position, table, expected_cache)
        torch.testing.assert_close(states[0].double(), state, rtol=5e-4, atol=5e-4)


@needs_library
def test_values_that_are_not_finite_reach_the_logits() -> None:
    hidden = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))
    hidden[0, 3] = float("nan")
    states, logits = run(Model("Q4_1", 2), hidden, POSITIONS[:2], TABLES[:2], new_cache())
    assert not torch.isfinite(states[0]).any()
    assert torch.isfinite(logits[1]).all()


@needs_library
def test_short_memory_is_an_exception_and_the_next_step_runs() -> None:
    model = Model("Q4_1", 2)
    hidden = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    cos, sin = model.rope.at(torch.tensor([0]))
    before = run(model, hidden, [0], [[0]], new_cache())
    with pytest.raises(MemoryError, match="no memory for a native decode step of 1 rows"):
        model.step.layers(hidden.clone(), cos[:, 0], sin[:, 0], torch.tensor([[0]]), torch.tensor([2**58]), new_cache())
    after = run(model, hidden, [0], [[0]], new_cache())
    assert torch.equal(before[1], after[1])


LIMITED = """
import resource, sys
sys.path[:0] = sys.argv[1:]
import torch
import test_native as t
hidden = torch.randn(1, t.HIDDEN, generator=torch.Generator().manual_seed(1))
_, expected = t.run(t.Model("Q4_1", 1), hidden, [0], [[0]], t.new_cache())
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))  # room for the stacks of a few threads
_, logits = t.run(t.Model("Q4_1", 1000), hidden, [0], [[0]], t.new_cache())
print(torch.equal(logits, expected))
"""


@needs_library
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is set from /proc, which this system does not have")
def test_a_team_is_as_large_as_the_system_allows() -> None:
    here = Path(__file__).parent
    result = subprocess.run([sys.executable, "-c", LIMITED, str(here), str(here.parent.parent)], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(native, "NATIVE_LIBRARY", broken)
    q4 = StoredTensor("q", "Q4_1", (32, 64), None, None)
    library.cache_clear()
    try:
        why = str(unsuited([q4], q4, 64))
    finally:
        library.cache_clear()
    assert why.startswith("libbroken.so can't be loaded (")
    assert "\n" not in why


@needs_library
def test_what_does_not_suit_is_named() -> None:
    rng = np.random.default_rng(0)
    q4, q8 = matrix(rng, "Q4_1", 32, 64), matrix(rng, "Q8_0", 32, 64)
    assert unsuited([q4], q8, 64) is None
    assert "Q8_0" in str(unsuited([q4, q8], q8, 64))
    assert "output head is Q4_1" in str(unsuited([q4], q4, 64))
    assert unsuited([q4], matrix(rng, "Q8_0", 33, 64), 64) == "Q8_0[33, 64] has the shape [33, 64], and it takes multiples of 16 and 32"
    assert "heads of 40 values" in str(unsuited([q4], q8, 40))


@needs_library
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("rows", [1, 5, 11, 12, 16, 33, 100])
@pytest.mark.parametrize(("out", "columns"), [(48, 96), (16, 32), (64, 64)])
def test_product_against_float64(tensor_type: str, rows: int, out: int, columns: int, num_threads: int) -> None:
    rng = np.random.default_rng(rows)
    first, second = matrix(rng, tensor_type, out, columns), matrix(rng, tensor_type, 16, columns)
    x = torch.from_numpy(rng.normal(0, 3, (rows, columns)).astype(np.float32))
    found = Q4Linear(pack_q4([first, second]), Team(num_threads))(x)
    expected = x.double() @ torch.cat([first.float(), second.float()]).double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-5 * float(expected.abs().max()))
