"""Make the tool model again: tokenizer, training, evaluation. `python deploy/tool_model/build.py`"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from conversations import HERE
from evaluate import evaluate
from tokenizer import train_tokenizer
from train import TrainConfig, train


def main() -> None:
    """Run the recipe; the options make smaller runs, the defaults are those of the committed weights."""
    default = TrainConfig()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=HERE.parents[1] / "pd_cluster" / "tool_model")
    parser.add_argument("--log", type=Path, default=HERE / "training.jsonl")
    parser.add_argument("--report", type=Path, default=HERE / "evaluation.json")
    parser.add_argument("--resume", type=Path, help="weights of an earlier cycle")
    parser.add_argument("--first", type=int, default=0, help="cycle to begin with, from 0")
    parser.add_argument("--steps", type=int, nargs="+", default=default.steps, help="of each cycle")
    options = parser.parse_args()
    target = options.target
    target.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    train(
        train_tokenizer(target),
        target,
        TrainConfig(steps=tuple(options.steps)),
        options.log,
        options.resume,
        options.first,
    )
    evaluate(target, options.report)


if __name__ == "__main__":
    main()
