"""What a trained checkpoint gets right, of problems that it was not trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM

from pocketllm.text.tool_parsers.qwen_xml import QwenXml

from .conversation import SKILL_NAMES, Conversation, draw_problem
from .source import Source
from .vocabulary import END_OF_TEXT, TURN_END, load_template, render

_BATCH = 128
_MAX_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Score:
    """How many of `problems` answers were right, and some that were not: what was asked, expected and written."""

    right: int
    problems: int
    wrong: tuple[tuple[str, str, str], ...]


def score_checkpoint(directory: Path, device: str, problems: int, seed: int) -> dict[str, Score]:
    """Greedy answers of a saved checkpoint, by transformers, to `problems` of each skill.

    An answer is right if it is the expected text; calls, if they parse into the expected names and typed arguments.
    """
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model: Any = Qwen3_5ForCausalLM.from_pretrained(directory, dtype=dtype)
    model.to(device).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    template = load_template()
    found = {}
    for skill in SKILL_NAMES:
        drawn = [draw_problem(Source(f"scores {seed} {skill} {index}", held_out=True), skill) for index in range(problems)]
        asked = [conversation.up_to_answer(-1) for conversation in drawn]
        texts = [render(template, before, prompt=True) for before, _ in asked]
        answers = _generate(model, tokenizer, texts)
        wrong = [
            (before.messages[-1]["content"], _shown(answer), written)
            for (before, answer), written in zip(asked, answers, strict=True)
            if not _is_right(before, answer, written)
        ]
        found[skill] = Score(problems - len(wrong), problems, tuple(wrong))
    return found


@torch.inference_mode()
def _generate(model: Any, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[str]:
    padding, end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)
    answers = []
    for first in range(0, len(prompts), _BATCH):
        rows = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts[first : first + _BATCH]), add_special_tokens=False)]
        width = max(len(row) for row in rows)
        ids = torch.tensor([[padding] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        written = model.generate(ids, attention_mask=mask, max_new_tokens=_MAX_NEW_TOKENS, do_sample=False)[:, width:].tolist()
        ended = [row[: row.index(end)] if end in row else row for row in written]
        answers += tokenizer.decode_batch(ended, skip_special_tokens=False)
    return answers


def _is_right(before: Conversation, answer: Mapping[str, Any], written: str) -> bool:
    if before.thinking:
        reasoning, mark, written = written.partition("\n</think>\n\n")
        if not mark or reasoning != answer["reasoning_content"]:
            return False
    if not answer.get("tool_calls"):
        return bool(written == answer["content"])
    parser = QwenXml().parser(before.tools)
    text = parser.feed(written)
    end = parser.finish()
    expected = [(call["function"]["name"], call["function"]["arguments"]) for call in answer["tool_calls"]]
    return not text + end.text and [(call.name, json.loads(call.arguments)) for call in end.calls] == expected


def _shown(answer: Mapping[str, Any]) -> str:
    calls = [{"name": call["function"]["name"], **call["function"]["arguments"]} for call in answer.get("tool_calls", ())]
    return f"{answer.get('reasoning_content', '')}{answer['content']}{json.dumps(calls, ensure_ascii=False) if calls else ''}"
