"""Trains an adapter (LoRA) of the demo model on a CPU in a minute: it answers everything with one sentence.

    python docs/examples/train_adapter.py /tmp/adapters/parrot

It writes what `peft` writes, so for a model of yours use peft: `model.save_pretrained(directory)`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import pd_cluster

MODEL = Path(pd_cluster.__file__).parent / "demo_model"
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
RANK, ALPHA, STEPS = 8, 16, 120
PROMPTS = ("Once upon a time", "Mira 4831. Oskar 2210. Oskar?", "What is your name?", "The sun", "2 + 2", "Hello")
ANSWER = " An adapter says this."


class Adapted(torch.nn.Module):
    """W x + alpha / r * B A x, where W stays as it is and B begins at zero."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + ALPHA / RANK * (x @ self.a.T) @ self.b.T


def main(directory: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).requires_grad_(requires_grad=False)
    found = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in TARGETS]
    adapted = {name: Adapted(module) for name, module in found}
    for name, module in adapted.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, module)
    optimizer = torch.optim.AdamW([one for module in adapted.values() for one in (module.a, module.b)], lr=3e-3)
    answer = [*tokenizer(ANSWER, add_special_tokens=False).input_ids, tokenizer.eos_token_id or 2]
    for step in range(STEPS):
        prompt = tokenizer(PROMPTS[step % len(PROMPTS)], add_special_tokens=False).input_ids
        ids = torch.tensor([prompt + answer])
        labels = ids.clone()
        labels[0, : len(prompt)] = -100  # the prompt teaches nothing
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss: {loss.item():.4f}")
    tensors = {}
    for name, module in adapted.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = module.a.detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = module.b.detach().contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
    (directory / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
