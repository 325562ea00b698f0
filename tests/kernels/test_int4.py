"""4-bit blocks in PyTorch's int4 layout against gguf's own dequantization."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from pocketllm.torch_engine.quant.int4 import BLOCK, PackedInt4, can_pack, pack_int4


def random_blocks(tensor_type: str, shape: tuple[int, int], offset: float = 0.0) -> tuple[np.ndarray, torch.Tensor]:
    """Blocks quantized from random weights, whose size varies by row, and what they hold in float64."""
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[0], 1))) + offset).astype(np.float32)
    kind = gguf.GGMLQuantizationType[tensor_type]
    blocks = gguf.quantize(values, kind)
    return blocks, torch.from_numpy(gguf.dequantize(blocks, kind)).double()


def multiply(x: torch.Tensor, packed: PackedInt4) -> torch.Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed.packed, BLOCK, packed.scales_and_zeros)


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("shape", [(16, 32), (32, 64), (48, 96), (64, 576), (80, 1536), (208, 32)])
@pytest.mark.parametrize("offset", [0.0, 2.0])
def test_each_weight_is_the_files_within_the_rounding_of_scale_and_zero(tensor_type: str, shape: tuple[int, int], offset: float) -> None:
    blocks, weights = random_blocks(tensor_type, shape, offset)
    packed = pack_int4(tensor_type, blocks)
    assert packed.scales_and_zeros.shape == (shape[1] // BLOCK, shape[0], 2)
    assert packed.scales_and_zeros.dtype == torch.bfloat16
    found = torch.cat([multiply(part, packed) for part in torch.eye(shape[1], dtype=torch.bfloat16).split(64)]).T.double()  # one column of W a row
    scales = packed.scales_and_zeros[..., 0].double().T.repeat_interleave(BLOCK, dim=1).abs()
    zeros = packed.scales_and_zeros[..., 1].double().T.repeat_interleave(BLOCK, dim=1).abs()
    quants = ((weights - packed.scales_and_zeros[..., 1].double().T.repeat_interleave(BLOCK, dim=1)) / scales).abs()  # |q - 8|
    # bfloat16 rounds by 2^-8 at most: scale and zero, then the weight that the kernel unpacks, then its product
    bound = 2**-8 * 1.03 * (quants * scales + zeros + 2 * weights.abs())
    assert ((found - weights).abs() <= bound).all()


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("num_rows", [1, 3, 6])
def test_products(tensor_type: str, num_rows: int) -> None:
    blocks, weights = random_blocks(tensor_type, (96, 256))
    x = torch.randn(num_rows, 256, dtype=torch.bfloat16)
    expected = x.double() @ weights.T
    found = multiply(x, pack_int4(tensor_type, blocks)).double()
    assert (found - expected).norm() < 2**-7 * expected.norm()


def test_scales_that_bfloat16_holds_are_exact() -> None:
    """Every nibble in each place of a block: the order of nibbles can't be wrong by chance."""
    rows = []
    for shift in range(16):
        quants = (np.arange(32) + shift) % 16
        rows.append(np.concatenate([np.array([0.5, -2.0], np.float16).view(np.uint8), (quants[:16] | quants[16:] << 4).astype(np.uint8)]))
    blocks = np.stack(rows)
    weights = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1))
    assert torch.equal(multiply(torch.eye(32, dtype=torch.bfloat16), pack_int4("Q4_1", blocks)).T.float(), weights)


def test_blocks_that_are_a_view_are_read_right() -> None:
    blocks, _ = random_blocks("Q4_1", (64, 64))
    every_other = pack_int4("Q4_1", blocks[::2])
    copied = pack_int4("Q4_1", blocks[::2].copy())
    assert torch.equal(every_other.packed, copied.packed)
    assert torch.equal(every_other.scales_and_zeros, copied.scales_and_zeros)


@pytest.mark.parametrize(
    ("tensor_type", "shape", "packs"),
    [
        ("Q4_0", (16, 32), True),
        ("Q4_1", (576, 1536), True),
        ("Q4_1", (17, 32), False),
        ("Q4_1", (8, 32), False),
        ("Q4_1", (16, 48), False),
        ("Q4_1", (32,), False),
        ("Q4_1", (2, 16, 32), False),
        ("Q8_0", (16, 32), False),
        ("F16", (16, 32), False),
    ],
)
def test_what_can_be_packed(tensor_type: str, shape: tuple[int, ...], packs: bool) -> None:
    assert can_pack(tensor_type, shape) is packs
