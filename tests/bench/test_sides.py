"""What is measured side by side, on one tiny checkpoint: each side does the work that it is timed for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pocketllm.bench import limits
from pocketllm.bench.limits import decode_ceiling, prefill_ceiling, token_costs
from pocketllm.bench.sides.base import Side, Spec, StoppedEarlyError, Timing
from pocketllm.bench.sides.pocketllm_side import PocketLLMSide
from pocketllm.bench.sides.select import check_peer, load_side
from pocketllm.checkpoint import open_checkpoint
from pocketllm.cli.main import main
from pocketllm.errors import ConfigurationError
from tests.server.tiny_model import write_tiny_chat_model

STEPS = 60  # enough for several events of each row on a machine that is busy
OPTIONS = ["--threads", "1", "--warmup", "0", "--repeats", "2", "--max-model-len", "256"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers, of which both PocketLLM and transformers read the safetensors."""
    return write_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["pocketllm", "transformers", "url"])
def side(request: pytest.FixtureRequest, tiny: Path, fake_url: str) -> Iterator[Side]:
    name = fake_url if request.param == "url" else request.param
    loaded = load_side(name, Spec(fake_url if request.param == "url" else tiny, threads=1, context=256, rows=3))
    yield loaded
    loaded.close()


def test_a_side_times_what_it_is_asked_for(side: Side) -> None:
    for rows in (1, 3):
        assert side.measure("whole", rows, 8, 12).tokens == rows * 12
        decoded = side.measure("decode", rows, 8, STEPS)
        if side.name == "transformers":
            assert decoded.tokens == rows * STEPS
        else:  # on streams rows begin one after another, and an event holds what has queued up
            assert 0 < decoded.tokens <= rows * (STEPS + rows + 4)
        prefill = side.measure("prefill", rows, 16)
        assert prefill.tokens == rows * 16 or side.name == "url"  # whose server counts the tokens of words
        assert prefill.rate == prefill.tokens / prefill.seconds
    assert side.discarded == 0
    assert side.facts


def test_answers_that_end_early_are_drawn_again(tiny: Path) -> None:
    class Ending(PocketLLMSide):
        calls = 0

        def whole(self, rows: int, prompt: int, answer: int) -> Timing:
            self.calls += 1
            if self.calls % 7:
                raise StoppedEarlyError("it ended")
            return super().whole(rows, prompt, answer)

    side = Ending(Spec(tiny, threads=1, context=64))
    try:
        with pytest.raises(StoppedEarlyError):
            side.measure("whole", 1, 4, 4)
        assert (side.calls, side.discarded) == (6, 5)
        assert side.measure("whole", 1, 4, 4).tokens == 4
        assert side.discarded == 5
    finally:
        side.close()


def test_costs_are_counted_from_the_checkpoint(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    costs = token_costs(checkpoint)
    layers = [tensor for tensor in checkpoint.tensors if ".layers." in tensor.name and tensor.name.endswith("_proj.weight")]
    assert len(layers) == 7 * checkpoint.config["num_hidden_layers"]
    assert costs["prefill_flops_per_token"] == 2 * sum(tensor.shape[0] * tensor.shape[1] for tensor in layers)
    embedding = next(tensor for tensor in checkpoint.tensors if "embed_tokens" in tensor.name)
    assert costs["bytes_per_token"] == checkpoint.num_bytes - embedding.num_bytes  # its head is a tensor of its own
    rates = {"read_bytes_per_s": 100 * costs["bytes_per_token"], "bf16_flops_per_s": 5e3 * costs["prefill_flops_per_token"], "f32_flops_per_s": 0.0}
    assert prefill_ceiling(rates, costs) == 5000
    assert decode_ceiling(rates, costs) == 100
    assert decode_ceiling(rates, costs, 4) == 400
    assert decode_ceiling(rates, costs, 1, costs["bytes_per_token"]) == 50  # with as many bytes of keys and values
    assert decode_ceiling(rates, costs, 100) == 5000  # by the products


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CPU_SIZES", (2**20, 8, 64))


@pytest.mark.usefixtures("small_limits")
def test_compare(tiny: Path, fake_url: str, read_report: Callable[[Path], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "compare.json", tmp_path / "compare.png"
    sizes = ["--input-tokens", "16", "--output-tokens", "24", "--batch", "2", "--rounds", "2", "--threads", "1", "--max-model-len", "512"]
    assert main(["bench", "compare", "--model", str(tiny), "--peer", fake_url, *sizes, "--output", str(output), "--plot", str(plot)]) == 0
    report = read_report(output)
    assert list(report["sides"]) == ["pocketllm", fake_url]
    for name, row in report["summary"].items():
        ours, theirs = ([one[name] for one in report["samples"][side]] for side in ("pocketllm", fake_url))
        assert len(ours) == 2
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        assert row["ratios"][fake_url] == pytest.approx({"median": sum(ratios) / 2, "min": min(ratios), "max": max(ratios), "count": 2})
    assert str(tiny.parent) not in output.read_text()
    assert report["command"].endswith(f"--peer {fake_url}")
    assert report["sides"]["pocketllm"]["peak_rss_bytes"] > 2**20
    assert report["sides"][fake_url]["peak_rss_bytes"] is None
    table = capsys.readouterr().out
    assert "batch 2 (128 + 64)" in table
    assert "ratio" in table
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("small_limits")
def test_throughput(tiny: Path, read_report: Callable[[Path], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "report.json", tmp_path / "report.png"
    sizes = ["--batch-sizes", "1,3", "--input-tokens", "16", "--output-tokens", "48", *OPTIONS]
    assert main(["bench", "throughput", "--model", str(tiny), *sizes, "--output", str(output), "--plot", str(plot)]) == 0
    report = read_report(output)
    assert [row["batch"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert row["output_tokens_per_s"]["count"] == 2
        assert row["share_of_limit"]["decode"] == row["decode_tokens_per_s"]["median"] / row["limits"]["decode"]
    assert "Peak memory:" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("small_limits")
def test_latency(tiny: Path, read_report: Callable[[Path], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "report.json", tmp_path / "report.png"
    sizes = ["--input-tokens", "16,32", "--output-tokens", "24", *OPTIONS]
    assert main(["bench", "latency", "--model", str(tiny), *sizes, "--output", str(output), "--plot", str(plot)]) == 0
    report = read_report(output)
    assert [row["input_tokens"] for row in report["rows"]] == [16, 32]
    for row in report["rows"]:
        assert row["ttft_ms"]["median"] > 0
        assert row["tpot_ms"]["count"] == 2
    assert report["engine"]["device"] == "cpu"
    assert "TTFT" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_gpu_that_torch_does_not_see_can_not_be_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "latency", "--model", str(tiny), "--device", "cuda", "--input-tokens", "16"]) == 2
    assert capsys.readouterr().err.strip().endswith('this one sees none. Install a CUDA build of torch, or send "cpu".')


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        ("nothing", "is not known"),
        ("vllm", "is not installed"),
        ("/nowhere/llama-bench", "/nowhere/llama-bench not found"),
    ],
)
def test_peers_that_can_not_run_are_named(peer: str, said: str, tiny: Path) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        check_peer(peer, tiny)
    assert caught.value.param == "peer"
