"""Stored matrices on their way to a GPU; the CPU stands for one, as nothing is computed with them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.torch_engine.kernels.fp8 import Fp8Weight
from pocketllm.torch_engine.layers.gpu_linear import GpuWeights
from pocketllm.torch_engine.quant.fp8 import BlockScales
from pocketllm.torch_engine.weights import StoredMatrix, StoredTensor

CPU = torch.device("cpu")


def fp8(name: str, rows: int) -> StoredTensor:
    values = torch.randn(rows, 128).to(torch.float8_e4m3fn)
    return StoredTensor(name, "F8_E4M3", (rows, 128), None, values, BlockScales(torch.rand(-(-rows // 128), 1), (128, 128)))


def test_embeddings_in_fp8_are_looked_up_in_the_compute_dtype_and_a_tied_head_shares_them() -> None:
    table = fp8("embed", 200)
    weights = GpuWeights(CPU, torch.float32)
    matrix = weights.matrix(table)
    assert isinstance(matrix, torch.Tensor)
    assert torch.equal(matrix, table.float())
    head = weights.linear(StoredMatrix([table], []))
    assert head.single is not None
    assert head.single.values is matrix


def test_neighbours_in_fp8_are_one_piece_unless_a_block_would_reach_into_the_next() -> None:
    weights = GpuWeights(CPU, torch.float32)
    whole = weights.linear(StoredMatrix([fp8("q", 256), fp8("k", 128), fp8("v", 128)], []))
    assert isinstance(whole.single, Fp8Weight)
    assert whole.single.shape[0] == 512
    ragged = weights.linear(StoredMatrix([fp8("q", 256), fp8("k", 64), fp8("v", 64)], []))
    assert ragged.single is None
    assert [part.shape[0] for part in ragged._parts] == [256, 64, 64]


def test_the_biases_of_pieces_are_those_of_their_rows() -> None:
    def vector(first: int, rows: int) -> StoredTensor:
        return StoredTensor(f"bias {first}", "F32", (rows,), None, torch.arange(first, first + rows).float())

    weights = GpuWeights(CPU, torch.float32)
    linear = weights.linear(StoredMatrix([fp8("q", 256), fp8("k", 64), fp8("v", 64)], [vector(0, 256), vector(256, 64), vector(320, 64)]))
    assert linear.single is None
    pieces = [bias for bias in linear._biases if bias is not None]
    assert [int(piece[0]) for piece in pieces] == [0, 256, 320]
    assert [piece.shape[0] for piece in pieces] == [256, 64, 64]
