"""Train a Qwen3.5 of 8 MB from nothing, on conversations made here: sums, copies, JSON, reasoning, tool calls and what is said about their results.

    PYTHONPATH=. python tools/train_tiny_qwen3_5.py --device cuda --out DIR [--minutes 5] [--seed 0]

A seed gives the same tokenizer and the same conversations everywhere; the weights differ a little from one machine to another. With --steps, a run ends
after so many steps at the latest. What was learnt is in DIR/training.json: for each skill, how many greedy answers to problems that were not trained on are
right.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    options = _options()

    # Here, so that the processes that make conversations, which import this file, load neither torch nor transformers.
    import torch
    import transformers

    from tiny_training.model import make_model, write_checkpoint
    from tiny_training.rows import draw_steps
    from tiny_training.scoring import score_checkpoint
    from tiny_training.training import DivergedError, train
    from tiny_training.vocabulary import train_tokenizer

    begin = time.monotonic()
    tokenizer = train_tokenizer(options.seed)
    model = make_model(tokenizer, options.seed).to(options.device)
    print(f"{model.num_parameters():,} weights, {tokenizer.get_vocab_size()} tokens", flush=True)
    steps = draw_steps(tokenizer, options.rows, options.seed, options.workers)
    try:
        outcome = train(model, steps, seconds=options.minutes * 60, max_steps=options.steps, learning_rate=options.learning_rate)
    except DivergedError as error:
        sys.exit(f"train_tiny_qwen3_5: {error}")
    finally:
        steps.close()
    write_checkpoint(model, tokenizer, options.out)
    print(f"wrote {options.out} after {time.monotonic() - begin:.0f} s", flush=True)

    scores = score_checkpoint(options.out, options.device, options.problems, options.seed)
    for skill, score in scores.items():
        print(f"{skill:7} {score.right} of {score.problems}")
        for question, expected, written in score.wrong[:3]:
            print(f"    asked    {question!r}\n    expected {expected!r}\n    wrote    {written!r}")
    record = {
        "command": "tools/train_tiny_qwen3_5.py",
        "seed": options.seed,
        "rows": options.rows,
        "learning_rate": options.learning_rate,
        "minutes": options.minutes,
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "seconds": round(outcome.seconds),
        "weights": model.num_parameters(),
        "device": torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "losses": {skill: round(loss, 5) for skill, loss in outcome.losses.items()},
        "scores": {skill: {"right": score.right, "of": score.problems} for skill, score in scores.items()},
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in options.out.iterdir() if file.is_file())
    print(f"{size:,} bytes in {options.out}, {time.monotonic() - begin:.0f} s in all")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the checkpoint goes")
    parser.add_argument("--device", default="cuda", help="cuda or cpu [cuda]")
    parser.add_argument("--minutes", type=float, default=5.0, help="to train for [5]")
    parser.add_argument("--steps", type=int, help="end after so many at the latest")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations and the weights [0]")
    parser.add_argument("--rows", type=int, default=192, help="conversations of a step [192]")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the highest [2e-3]")
    parser.add_argument("--problems", type=int, default=128, help="to score each skill on [128]")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that make conversations [the cores but two]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
