"""The skinny products against torch in float32: ragged shapes, every weight format, every way of tiling."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.torch_engine.kernels import linear as kernels
from pocketllm.torch_engine.kernels.fp8 import Fp8Weight, dequantize_fp8, dequantize_fp8_reference
from pocketllm.torch_engine.kernels.launch import DeviceLimits
from pocketllm.torch_engine.kernels.linear import DenseWeight, Weight, add_linear, linear, norm_gated_linear, norm_linear, norm_linear_with_tail
from pocketllm.torch_engine.kernels.linear_config import (
    MAX_ROWS,
    MAX_SPLIT_BLOCKS,
    Config,
    MatrixConfig,
    StreamConfig,
    VectorConfig,
    candidates,
    choose_config,
)

# of the largest result; sums are float32, so what is left is the rounding of operands and results to the dtype
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
FORMATS = [torch.float32, torch.float16, torch.bfloat16, "fp8"]
VECTOR, MATRIX = VectorConfig(4, 64, 1), MatrixConfig(16, 32, 1, 2)
SPLIT = MatrixConfig(16, 32, 1, 2, split=3)
STREAM = StreamConfig(4, 64, 1, per_multiprocessor=3)


@pytest.fixture(autouse=True)
def skip_what_the_gpu_lacks(triton_device: str, request: pytest.FixtureRequest) -> None:
    wanted = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    if torch.bfloat16 in wanted and triton_device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no bfloat16")


def build(kind: torch.dtype | str, rows: int, columns: int, device: str, block: tuple[int, int] = (32, 32)) -> Weight:
    values = torch.randn(rows, columns, device=device)
    if isinstance(kind, torch.dtype):
        return DenseWeight(values.to(kind))
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]), device=device) + 0.5
    return Fp8Weight(values.to(torch.float8_e4m3fn), scales, block)


def compute_dtype(kind: torch.dtype | str) -> torch.dtype:
    return kind if isinstance(kind, torch.dtype) else torch.float16


def check(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    limit = TOLERANCES[dtype] * float(wanted.float().abs().max())
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=limit)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("rows", "config"),
    [(1, VECTOR), (1, STREAM), (1, None), (1, MATRIX), (3, MATRIX), (3, SPLIT), (17, None), (64, MATRIX), (65, None)],
    ids=lambda value: "chosen" if value is None else str(value),
)
def test_linear(kind: torch.dtype | str, rows: int, config: Config | None, triton_device: str) -> None:
    weight, dtype = build(kind, 50, 144, triton_device), compute_dtype(kind)
    x, bias = torch.randn(rows, 144, device=triton_device).to(dtype), torch.randn(50, device=triton_device).to(dtype)
    check(linear(x, weight, config=config), kernels.linear_reference(x, weight), dtype)
    found = linear(x, weight, bias, torch.float32, config=config)
    if rows > MAX_ROWS and kind == "fp8":
        return  # there the weights are rounded to the dtype of x
    # what comes out as float32 was never rounded: only the products' order differs
    torch.testing.assert_close(found, kernels.linear_reference(x, weight, bias, torch.float32), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize(("rows", "config"), [(1, VECTOR), (1, STREAM), (1, SPLIT), (5, SPLIT), (33, MATRIX), (70, None)], ids=str)
def test_add_linear(kind: torch.dtype | str, rows: int, config: Config | None, triton_device: str) -> None:
    weight, dtype = build(kind, 50, 144, triton_device), compute_dtype(kind)
    x, bias, hidden = (torch.randn(*shape, device=triton_device) for shape in ((rows, 144), (50,), (rows, 50)))
    x = x.to(dtype)
    wanted = hidden + kernels.linear_reference(x, weight, bias, torch.float32)
    found = add_linear(hidden, x, weight, bias, config=config)
    assert found is hidden
    check(hidden, wanted, dtype)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize(("rows", "config"), [(1, VECTOR), (1, STREAM), (1, None), (1, MATRIX), (4, SPLIT), (66, None)], ids=str)
def test_norm_linear(kind: torch.dtype | str, rows: int, config: Config | None, triton_device: str) -> None:
    weight, dtype = build(kind, 50, 144, triton_device), compute_dtype(kind)
    hidden, norm_weight = 3 * torch.randn(rows, 144, device=triton_device), torch.rand(144, device=triton_device) + 0.5
    bias = torch.randn(50, device=triton_device)
    found = norm_linear(hidden, norm_weight, 1e-5, weight, bias, dtype, config=config)
    check(found, kernels.norm_linear_reference(hidden, norm_weight, 1e-5, weight, bias, dtype), dtype)


@pytest.mark.parametrize(
    ("kind", "rows", "config"),
    [
        *((kind, 3, StreamConfig(4, 256, 1, 5)) for kind in (torch.float32, torch.float16, torch.bfloat16)),
        (torch.bfloat16, 300, StreamConfig(4, 256, 1)),
        (torch.bfloat16, 9, StreamConfig(4, 64, 1)),
        (torch.float32, 9, VECTOR),
    ],
    ids=str,
)
def test_norm_linear_with_rows_of_another_kind_below(kind: torch.dtype, rows: int, config: Config, triton_device: str) -> None:
    """Fewer rows below than programs, which one kernel takes, and more."""
    weight, tail = build("fp8", 52, 144, triton_device), build(kind, rows, 144, triton_device)
    assert isinstance(tail, DenseWeight)
    hidden, norm_weight = 3 * torch.randn(1, 144, device=triton_device), torch.rand(144, device=triton_device) + 0.5
    out = torch.full((1, 52 + rows), torch.nan, device=triton_device)
    found = norm_linear_with_tail(hidden, norm_weight, 1e-5, weight, tail, out, config=config)
    assert found is out
    wanted = [kernels.norm_linear_reference(hidden, norm_weight, 1e-5, part, None, torch.float32) for part in (weight, tail)]
    check(out[:, :52], wanted[0], torch.float32)
    check(out[:, 52:], wanted[1], torch.float32)


@pytest.mark.parametrize(
    ("activation", "kind"),
    [*(("silu", kind) for kind in FORMATS), *(("gelu_tanh", kind) for kind in (FORMATS if torch.cuda.is_available() else FORMATS[:1]))],
    ids=str,
)
@pytest.mark.parametrize(("rows", "config"), [(1, VECTOR), (1, STREAM), (1, SPLIT), (4, MATRIX), (9, SPLIT), (66, None)], ids=str)
def test_norm_gated_linear(kind: torch.dtype | str, rows: int, config: Config | None, activation: str, triton_device: str) -> None:
    weight, dtype = build(kind, 2 * 36, 144, triton_device), compute_dtype(kind)
    hidden, norm_weight = torch.randn(rows, 144, device=triton_device), torch.rand(144, device=triton_device)
    found = norm_gated_linear(hidden, norm_weight, 1e-5, weight, activation, dtype, config=config)
    check(found, kernels.norm_gated_linear_reference(hidden, norm_weight, 1e-5, weight, activation, dtype), dtype)


@pytest.mark.parametrize("rows", [1, 5, 65])
def test_strided_operands_and_columns_of_a_wider_result(rows: int, triton_device: str) -> None:
    stored, wide_x = torch.randn(20, 96, device=triton_device), torch.randn(rows, 80, device=triton_device)
    weight, x = DenseWeight(stored[:, 16:80]), wide_x[:, 8:72]
    out = torch.full((rows, 30), 7.0, device=triton_device)
    found = linear(x, weight, out=out[:, 5:25])
    assert found.data_ptr() == out[:, 5:25].data_ptr()
    check(out[:, 5:25].clone(), kernels.linear_reference(x, weight), torch.float32)
    assert bool((out[:, :5] == 7).all())
    assert bool((out[:, 25:] == 7).all())
    normed = torch.zeros(rows, 30, device=triton_device)
    norm_linear(x, torch.ones(64, device=triton_device), 1e-6, weight, out=normed[:, 10:])
    check(normed[:, 10:], kernels.norm_linear_reference(x, torch.ones(64, device=triton_device), 1e-6, weight), torch.float32)
    hidden = torch.zeros(rows, 40, device=triton_device)
    add_linear(hidden[:, 20:], x, weight)
    check(hidden[:, 20:], kernels.linear_reference(x, weight), torch.float32)


@pytest.mark.parametrize("columns", [30, 33, 100])
def test_rows_that_are_no_multiple_of_16_bytes(columns: int, triton_device: str) -> None:
    weight, x = build(torch.float16, 10, columns, triton_device), torch.randn(1, columns, device=triton_device)
    half = x.half()
    check(linear(half, weight), kernels.linear_reference(half, weight), torch.float16)
    ones = torch.ones(columns, device=triton_device)
    check(norm_linear(x, ones, 1e-6, weight), kernels.norm_linear_reference(x, ones, 1e-6, weight), torch.float16)


@pytest.mark.parametrize(
    "config", [VectorConfig(8, 128, 1, words=2), VectorConfig(8, 128, 1), StreamConfig(4, 128, 1, words=2), StreamConfig(2, 256, 1, 3)], ids=str
)
def test_one_row_of_fp8_in_several_tiles(config: Config, triton_device: str) -> None:
    """Tiles that fill the columns and tiles that do not, rows that fill the last program's and rows that do not."""
    for rows, columns in ((16, 512), (10, 272), (16, 144)):
        weight, x = build("fp8", rows, columns, triton_device), torch.randn(1, columns, device=triton_device)
        ones = torch.rand(columns, device=triton_device) + 0.5
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            found = linear(x.to(dtype), weight, out_dtype=torch.float32, config=config)
            check(found, kernels.linear_reference(x.to(dtype), weight, out_dtype=torch.float32), torch.float32)
        found = norm_linear(x, ones, 1e-5, weight, out_dtype=torch.float32, config=config)
        check(found, kernels.norm_linear_reference(x, ones, 1e-5, weight, out_dtype=torch.float32), torch.float32)
        found = norm_gated_linear(x, ones, 1e-5, weight, "silu", torch.float32, config=config)
        check(found, kernels.norm_gated_linear_reference(x, ones, 1e-5, weight, "silu", torch.float32), torch.float32)


@pytest.mark.parametrize("block", [(1, 128), (16, 128), (7, 48), (64, 16)], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_fp8_blocks_of_any_height(block: tuple[int, int], rows: int, triton_device: str) -> None:
    weight, x = build("fp8", 28, 272, triton_device, block), torch.randn(rows, 272, device=triton_device)
    config: Config = VectorConfig(8, 256, 1) if rows == 1 else MatrixConfig(16, 128, 1, 2)
    check(linear(x, weight, config=config), kernels.linear_reference(x, weight), torch.float32)
    ones = torch.ones(272, device=triton_device)
    found = norm_gated_linear(x, ones, 1e-6, weight, "silu", torch.float32, config=config)
    check(found, kernels.norm_gated_linear_reference(x, ones, 1e-6, weight, "silu", torch.float32), torch.float32)


def test_every_fp8_code_is_read_as_torch_reads_it(triton_device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=triton_device).view(torch.float8_e4m3fn)
    weight = Fp8Weight(codes.expand(3, 256).contiguous(), torch.tensor([[1.0, 0.25]], device=triton_device), (16, 128))
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(dequantize_fp8(weight, dtype).nan_to_num(), dequantize_fp8_reference(weight, dtype).nan_to_num())
        assert torch.equal(dequantize_fp8(weight, dtype).isnan(), dequantize_fp8_reference(weight, dtype).isnan())
    finite = codes.float().nan_to_num()
    column = torch.zeros(256, 64, device=triton_device)
    column[:, 16] = finite  # a code a row
    weight = Fp8Weight(column.to(torch.float8_e4m3fn), torch.ones(16, 1, device=triton_device), (16, 64))
    x = torch.zeros(1, 64, device=triton_device)
    x[0, 16] = 1
    for config in (VectorConfig(16, 64, 1), MatrixConfig(64, 64, 1, 2)):
        assert torch.equal(linear(x, weight, config=config)[0], finite)


def test_dequantize_fp8_writes_where_it_is_told(triton_device: str) -> None:
    weight = build("fp8", 50, 144, triton_device)
    assert isinstance(weight, Fp8Weight)
    out = torch.zeros(60, 150, device=triton_device)
    dequantize_fp8(weight, torch.float32, out[5:55, 3:147])
    assert torch.equal(out[5:55, 3:147], dequantize_fp8_reference(weight, torch.float32))
    assert bool((out[:5] == 0).all() and (out[55:] == 0).all() and (out[:, :3] == 0).all() and (out[:, 147:] == 0).all())


def test_a_split_product_leaves_its_tickets_at_zero_and_repeats_itself(triton_device: str) -> None:
    weight, x = build(torch.float32, 70, 160, triton_device), torch.randn(6, 160, device=triton_device)
    first, second = (linear(x, weight, config=SPLIT) for _ in range(2))
    assert torch.equal(first, second)
    assert int(kernels._tickets(x.device, threading.get_ident()).abs().sum()) == 0


def test_a_rows_result_does_not_depend_on_the_rows_beside_it(triton_device: str) -> None:
    weight, x = build(torch.float32, 40, 96, triton_device), torch.randn(16, 96, device=triton_device)
    together = linear(x, weight, config=SPLIT)
    x[1:] = float("nan")
    assert torch.equal(linear(x, weight, config=SPLIT)[0], together[0])


def test_no_rows(triton_device: str) -> None:
    weight = build(torch.float32, 8, 32, triton_device)
    x, ones = torch.zeros(0, 32, device=triton_device), torch.ones(32, device=triton_device)
    assert linear(x, weight).shape == (0, 8)
    assert norm_linear(x, ones, 1e-6, weight).shape == (0, 8)
    assert norm_gated_linear(x, ones, 1e-6, weight, "silu").shape == (0, 4)
    assert add_linear(torch.zeros(0, 8, device=triton_device), x, weight).shape == (0, 8)


def test_a_chosen_config_fits_its_shape() -> None:
    shapes = [(12352, 4096), (10240, 4096), (4096, 12288), (248320, 4096), (2048, 1024), (64, 4096), (576, 1536), (5, 16), (2000000, 2048)]
    for rows, columns in shapes:
        for num_rows in (1, 2, 16, 17, MAX_ROWS):
            for itemsize in (1, 2, 4):
                for gated in (False, True):
                    config = choose_config(num_rows, rows, columns, itemsize, gated, DeviceLimits(132, 99 * 1024, True))
                    assert isinstance(config, VectorConfig if num_rows == 1 else MatrixConfig)
                    sizes: list[Any] = [config.block_n, config.block_k, config.num_warps]
                    assert all(size > 0 and size & (size - 1) == 0 for size in sizes)
                    if isinstance(config, MatrixConfig):
                        assert config.split == 1 or -(-rows // config.block_n) <= MAX_SPLIT_BLOCKS
                        tile = config.block_k * (config.block_n * (1 + gated) * itemsize + max(16, num_rows) * max(2, itemsize))
                        assert tile * config.num_stages <= 99 * 1024
    assert all(isinstance(config, MatrixConfig) for config in candidates(8, 2, False))
    assert {type(config) for config in candidates(1, 2, True)} == {VectorConfig, MatrixConfig}


def test_what_is_refused(triton_device: str) -> None:
    values = torch.zeros(32, 64, device=triton_device).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"float32 scales \(2, 2\), not .*\(1, 2\)"):
        Fp8Weight(values, torch.ones(1, 2, device=triton_device), (16, 32))
    with pytest.raises(ValueError, match="multiple of 16 columns, not 8"):
        Fp8Weight(values, torch.ones(2, 8, device=triton_device), (16, 8))
    with pytest.raises(ValueError, match="one row, not 2"):
        linear(torch.zeros(2, 64, device=triton_device), build(torch.float32, 8, 64, triton_device), config=VECTOR)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [2, 3, 16, 17, 33, 64])
@pytest.mark.parametrize("kind", FORMATS[1:], ids=str)
def test_large_matrices_on_a_gpu(kind: torch.dtype | str, rows: int) -> None:
    """The tiles chosen for real models, which Hopper's warpgroups multiply: split and not, gated and not, of both 16-bit types where the weights are FP8."""
    for N, K in ((2048, 2048), (16384, 2048)):
        weight = build(kind, N, K, "cuda", (128, 128))
        for dtype in (torch.float16, torch.bfloat16) if kind == "fp8" else (compute_dtype(kind),):
            x, ones = torch.randn(rows, K, device="cuda"), torch.ones(K, device="cuda")
            check(linear(x.to(dtype), weight), kernels.linear_reference(x.to(dtype), weight), dtype)
            found = norm_gated_linear(x, ones, 1e-6, weight, "silu", dtype)
            check(found, kernels.norm_gated_linear_reference(x, ones, 1e-6, weight, "silu", dtype), dtype)
