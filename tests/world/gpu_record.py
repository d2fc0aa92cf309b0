"""SmolLM2's log-probabilities on a GPU: ours in bf16 beside transformers in float32 there, and its own bf16.

python -m tests.world.gpu_record GGUF... [--device cuda] [--out FILE]

The GGUF may come in parts, in order. Scored are the 40 prompts with transformers' greedy continuations. Tokens are not
compared: two best logits of bf16 are often equal, and sums depend on the batch. Exit status 1: the bounds are missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch

from tests.cluster import Launcher
from tests.world import smollm2
from tests.world.smollm2_reference import SmolLM2

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_NEW_TOKENS = 48
AT_ONCE = 8
MOST_MEAN, MOST_P99 = 0.04, 0.22  # errors of log-probabilities; transformers' own bf16: 0.037 and 0.216
REQUEST_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute differences of log-probabilities."""

    tokens: int
    mean: float
    p99: float
    greatest: float

    @classmethod
    def between(cls, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Errors:
        off = (torch.cat([*found]).double().cpu() - torch.cat([*expected]).double().cpu()).abs()
        assert bool(off.isfinite().all())
        return cls(len(off), float(off.mean()), float(off.quantile(0.99)), float(off.max()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world.gpu_record", description=__doc__)
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--num-prompts", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "smollm2"
        whole = Path(folder) / "whole.gguf"
        whole.write_bytes(b"".join(part.read_bytes() for part in args.parts))
        smollm2.convert(whole, directory)
        record = measured(directory, args.device, args.num_prompts)
    sys.stdout.write(f"{json.dumps(record)}\n")
    if args.out:
        args.out.write_text(f"{json.dumps(record)}\n")
    ours = record["ours_bf16"]
    return 0 if ours["mean"] <= MOST_MEAN and ours["p99"] <= MOST_P99 else 1


def measured(directory: Path, device: str, num_prompts: int) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    reference = SmolLM2(directory, device)
    prompts = [ids for ids, _ in reference.prompts()][:num_prompts]
    texts = [[*ids, *reference.continued(ids, (), NUM_NEW_TOKENS).tokens] for ids in prompts]
    exact = [reference.scores(ids) for ids in texts]
    reference.model.to(torch.bfloat16)
    theirs = [reference.scores(ids) for ids in texts]
    del reference
    ours = scores_of_a_node(directory, device, texts)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "prompts": len(texts),
        "ours_bf16": asdict(Errors.between(ours, exact)),
        "transformers_bf16": asdict(Errors.between(theirs, exact)),
        "ours_beside_transformers_bf16": asdict(Errors.between(ours, theirs)),
    }


def scores_of_a_node(directory: Path, device: str, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """`prompt_logprobs` of a node in bf16, several prompts at once."""
    room = ["--gpu-memory-utilization=0.3"] if device == "cuda" else ["--kv-cache-gb=0.5"]
    flags = [f"--model={directory}", f"--device={device}", "--dtype=bfloat16", "--connector=none", *room]
    with Launcher() as launcher, ThreadPoolExecutor(AT_ONCE) as pool:
        node = launcher.command("mixed", "--port=0", *flags)
        node.wait_line("ready: ", 300)
        sys.stdout.write("\n".join(line for line in node.lines if "backend" in line or "bfloat16" in line) + "\n")

        def score(ids: Sequence[int]) -> torch.Tensor:
            body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            answer = httpx.post(
                f"{node.url}/v1/completions", json=body, timeout=REQUEST_DEADLINE_S, trust_env=False
            )  # fmt: skip
            assert answer.status_code == 200, answer.text
            told = answer.json()["choices"][0]["prompt_logprobs"][1:]
            return torch.tensor([entry[str(token)]["logprob"] for token, entry in zip(ids[1:], told, strict=True)])

        return list(pool.map(score, texts))


if __name__ == "__main__":
    sys.exit(main())
