"""GGUF files: read right and fast, and refused in one line when they are broken."""

from __future__ import annotations

import random
import re
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from pocketllm.errors import ConfigurationError
from pocketllm.gguf_file import open_gguf


def refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def header(kv_count: int = 0, tensor_count: int = 0, *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensor_count, kv_count)


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def test_metadata_and_tensors_equal_those_of_the_package(write_gguf):
    weights = np.arange(64, dtype=np.float32).reshape(2, 32)
    path = write_gguf(tensors={"token_embd.weight": weights, "b": weights[0].astype(np.float16)}, extra__flag=True, extra__numbers=[1.5, 2.5])
    ours, theirs = open_gguf(path), GGUFReader(path)
    assert ours.metadata == {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.tensors) == ["token_embd.weight", "b"]
    np.testing.assert_array_equal(ours.tensors["token_embd.weight"].data, weights)
    np.testing.assert_array_equal(ours.tensors["b"].data, weights[0].astype(np.float16))


def test_the_default_model_opens_fast_and_equals_the_package(default_model):
    started = time.process_time()
    ours = open_gguf(default_model)
    assert time.process_time() - started < 1.5
    theirs = GGUFReader(default_model)
    assert ours.metadata == {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    for mine, other in zip(ours.tensors.values(), theirs.tensors, strict=True):
        assert (mine.name, mine.tensor_type, mine.n_bytes, mine.data_offset, mine.data.shape) == (
            other.name,
            other.tensor_type,
            other.n_bytes,
            other.data_offset,
            other.data.shape,
        )


def resident_kib(array: np.ndarray) -> int:
    """Memory that the mapping which holds `array` takes in this process."""
    address = array.__array_interface__["data"][0]
    parts = re.split(r"^([0-9a-f]+)-([0-9a-f]+) .*$", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (facts,) = [facts for start, end, facts in zip(parts[1::3], parts[2::3], parts[3::3], strict=True) if int(start, 16) <= address < int(end, 16)]
    return int(re.search(r"^Rss:\s+(\d+) kB", facts, re.MULTILINE)[1])


def test_released_pages_can_be_read_again(default_model):
    file = open_gguf(default_model)
    tensor = file.tensors["token_embd.weight"].data
    before = int(tensor.sum(dtype=np.int64))
    has_smaps = Path("/proc/self/smaps").exists()
    if has_smaps:
        assert resident_kib(tensor) >= tensor.nbytes // 1024
    file.release_pages()
    if has_smaps:
        assert resident_kib(tensor) == 0
    assert int(tensor.sum(dtype=np.int64)) == before


def test_alignment_is_read_from_the_file(write_gguf):
    path = write_gguf(general__alignment=128, tensors={"w": np.ones(4, np.float32)})
    assert open_gguf(path).tensors["w"].data_offset % 128 == 0
    np.testing.assert_array_equal(open_gguf(path).tensors["w"].data, np.ones(4, np.float32))


@pytest.mark.parametrize("cut", [4, 8, 24, 30, 200, 1000, 5000])
def test_a_truncated_file_is_refused(write_gguf, cut):
    path = write_gguf()
    path.write_bytes(path.read_bytes()[:cut])
    message = refusal(path)
    assert "truncated" in message
    assert "Download it again" in message


def test_a_file_cut_in_the_last_tensor_is_refused(write_gguf):
    path = write_gguf()
    path.write_bytes(path.read_bytes()[:-64])
    assert "truncated" in refusal(path)


def test_every_truncation_of_the_header_is_refused(write_gguf):
    path = write_gguf(tokenizer__ggml__tokens=["a", "b"], tokenizer__ggml__token_type=None, tensors={"w": np.ones(4, np.float32)})
    whole = path.read_bytes()
    for cut in range(len(whole) - 20):
        path.write_bytes(whole[:cut])
        refusal(path)


def test_flipped_header_bytes_raise_nothing_but_a_refusal(write_gguf):
    path = write_gguf(tensors={"w": np.ones((2, 32), np.float32)})
    whole = path.read_bytes()
    generator = random.Random(7)
    messages = []
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.choice([0, 1, 127, 128, 255, generator.randrange(256)])
        path.write_bytes(damaged)
        try:
            open_gguf(path)
        except ConfigurationError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(64), "not a GGUF file"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "byte order"),
        (header(kv_count=2**63), "truncated"),
        (header(tensor_count=2**63), "truncated"),
        (header(kv_count=1) + gguf_string(b"k") + struct.pack("<I", 99), "unknown type 99"),
        (header(kv_count=1) + gguf_string(b"\xff\xfe") + struct.pack("<IB", 7, 1), "not UTF-8"),
        (header(kv_count=1) + gguf_string(b"k") + struct.pack("<IIQ", 9, 4, 2**62), "truncated"),
        (header(kv_count=1) + gguf_string(b"k") + struct.pack("<IIQ", 9, 8, 2**62), "truncated"),
        (header(kv_count=1) + gguf_string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 99, "too deep"),
        (header(kv_count=2) + 2 * (gguf_string(b"k") + struct.pack("<IB", 0, 1)), "twice"),
        (header(tensor_count=1) + gguf_string(b"w") + struct.pack("<IQIQ", 1, 4, 77, 0) + bytes(64), "'w' has the type 77"),
        (header(tensor_count=1) + gguf_string(b"w") + struct.pack("<I", 9) + bytes(200), "9 dimensions"),
        (header(tensor_count=1) + gguf_string(b"w") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), "shape"),
        (header(tensor_count=1) + gguf_string(b"w") + struct.pack("<IQIQ", 1, 4, 0, 2**63), "truncated"),
        (header(tensor_count=2) + 2 * (gguf_string(b"w") + struct.pack("<IQIQ", 1, 4, 0, 0)) + bytes(64), "duplicated tensor"),
        (header(tensor_count=1) + gguf_string(b"w") + struct.pack("<IQIQ", 1, 33, 3, 0) + bytes(200), "not a valid GGUF file"),
    ],
)
def test_a_broken_file_is_refused_and_the_message_says_how(tmp_path, content, words):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    assert words in refusal(path)


def test_missing_and_directory_paths_are_refused(tmp_path):
    assert "does not exist" in refusal(tmp_path / "no.gguf")
    assert "is a directory" in refusal(tmp_path)
