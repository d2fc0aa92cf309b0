"""Make the demo model again: tokenizer, training, evaluation. `python deploy/demo_model/build.py`"""

from __future__ import annotations

import argparse
from pathlib import Path

from evaluate import evaluate
from grammar import HERE
from tokenizer import train_tokenizer
from train import TrainConfig, train


def main() -> None:
    """Run the recipe; the options make smaller runs, the defaults are those of the published weights."""
    default = TrainConfig()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=HERE.parents[1] / "pd_cluster" / "demo_model")
    parser.add_argument("--report", type=Path, default=HERE / "evaluation.json")
    parser.add_argument("--log", type=Path, default=HERE / "training.jsonl")
    for name in ("steps", "more_steps", "tokens_per_step", "english_rows", "num_documents", "num_workers"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    parser.add_argument("--resume", type=Path, help="weights of the first cycle, to run the second only")
    parser.add_argument("--questions", type=int, default=40, help="per cell of the evaluation")
    options = vars(parser.parse_args())
    keys = ("target", "report", "log", "questions", "resume")
    target, report, log, questions, resume = (options.pop(key) for key in keys)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(target)
    train(tokenizer, target, TrainConfig(**options), log, resume)
    evaluate(target, report, questions)


if __name__ == "__main__":
    main()
