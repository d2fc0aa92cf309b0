"""Train the demo model: Qwen3 architecture, recall by a curriculum, English beside it."""

from __future__ import annotations

import copy
import json
import multiprocessing
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from recall import DIGIT_WEIGHT, LEVELS, BatchStream, build_lexicon
from tokenizer import CONTEXT, END_OF_TEXT, IM_END, VOCAB_SIZE
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class TrainConfig:
    """What the training run is made of; the defaults are those of the published weights."""

    steps: int = 2400  # of the first cycle, with the curriculum
    more_steps: int = 1000  # of the second cycle, at the top level from its start
    tokens_per_step: int = 131_072
    english_rows: int = 192
    num_documents: int = 40_000
    num_workers: int = 12
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    decay_from: float = 0.5  # of a cycle, from where its learning rate falls to zero
    weight_decay: float = 0.1
    threshold: float = 0.93  # of the digits right, to leave a level
    seed: int = 1


def model_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    """The architecture: 8 query heads on 4 KV heads of 64, so tensor parallelism up to 4."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(IM_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        attn_implementation="sdpa",
    )


def weighted_loss(model: Qwen3ForCausalLM, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy over tokens with a weight, and the share of answer digits predicted right."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    target, weight = ids[:, 1:], weights[:, 1:]
    keep = weight > 0
    logits = model.lm_head(hidden[keep]).float()
    target, weight = target[keep], weight[keep]
    loss = (functional.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    digits = weight == DIGIT_WEIGHT
    right = (logits.detach().argmax(-1) == target)[digits].float().mean()
    return loss, right


def _optimizer(model: Qwen3ForCausalLM, config: TrainConfig, cuda: bool) -> torch.optim.AdamW:
    """AdamW without weight decay on gains."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=cuda)


class Trainer:
    """Two cycles of training over one model; the weights are rounded to bfloat16 between and after them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, log: Path, resume: Path | None) -> None:
        torch.manual_seed(config.seed)
        self.config, self.log, self.cuda = config, log, torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        if resume is None:
            self.model = Qwen3ForCausalLM(model_config(tokenizer)).to(self.device)
        else:
            self.model = Qwen3ForCausalLM.from_pretrained(resume, dtype=torch.float32).to(self.device)
        self.lexicon = build_lexicon(tokenizer, config.num_documents, config.seed)
        self.level = multiprocessing.Value("i", 0)
        self.average = 0.0  # of the digits right, at the present level
        self.records: list[dict[str, float]] = []
        self.start = time.monotonic()

    def cycle(self, number: int, steps: int, level: int) -> None:
        """Train for `steps` from `level` on, with a fresh optimizer and data of its own."""
        config = self.config
        self.level.value, self.average = level, 0.0
        optimizer = _optimizer(self.model, config, self.cuda)
        seed = config.seed + number
        stream = BatchStream(self.lexicon, self.level, config.tokens_per_step, config.english_rows, seed)
        loader = DataLoader(stream, batch_size=None, num_workers=config.num_workers, pin_memory=self.cuda)
        for step, (at_level, *arrays) in zip(range(steps), loader, strict=False):
            fall = (1.0 - step / steps) / (1.0 - config.decay_from)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * min((step + 1) / config.warmup_steps, 1.0, max(0.02, fall))
            losses, right = self._step(optimizer, arrays)
            if at_level == self.level.value:
                self._advance(float(right))
            if step % 100 == 0:
                self._record(number, step, at_level, losses)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        print(f"cycle {number} ends after {time.monotonic() - self.start:.0f} s", flush=True)

    def _step(self, optimizer: torch.optim.Optimizer, arrays: list[Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """One step over a recall batch and an English batch."""
        ids, weights, english_ids, english_weights = (array.to(self.device, non_blocking=True) for array in arrays)
        with torch.autocast("cuda", dtype=torch.bfloat16) if self.cuda else nullcontext():
            loss, right = weighted_loss(self.model, ids, weights)
            loss.backward()
            english_loss, _ = weighted_loss(self.model, english_ids, english_weights)
            (0.5 * english_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return (loss.detach(), english_loss.detach()), right

    def _advance(self, right: float) -> None:
        """Go to the next level once the present one is answered well."""
        self.average = 0.8 * self.average + 0.2 * right
        if self.average > self.config.threshold and self.level.value < len(LEVELS) - 1:
            self.level.value, self.average = self.level.value + 1, 0.0

    def _record(self, number: int, step: int, level: int, losses: tuple[Tensor, Tensor]) -> None:
        """One line of the training log."""
        record = {
            "cycle": number,
            "step": step,
            "level": level,
            "digits": round(self.average, 4),
            "loss": round(losses[0].item(), 4),
            "english_loss": round(losses[1].item(), 4),
            "s": round(time.monotonic() - self.start, 1),
        }
        self.records.append(record)
        print(json.dumps(record), flush=True)
        self.log.write_text("".join(json.dumps(record) + "\n" for record in self.records))


def train(
    tokenizer: PreTrainedTokenizerBase, target: Path, config: TrainConfig, log: Path, resume: Path | None = None
) -> None:
    """Train and save to `target`; `resume` is a directory with the weights of the first cycle."""
    trainer = Trainer(tokenizer, config, log, resume)
    if resume is None:
        trainer.cycle(0, config.steps, 0)
        save(trainer.model, target)
    trainer.cycle(1, config.more_steps, len(LEVELS) - 1)
    save(trainer.model, target)


def save(model: Qwen3ForCausalLM, target: Path) -> None:
    """Save as bfloat16; the tokenizer is there already."""
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(target)
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where transformers 4 looks for it
    path.write_text(json.dumps(config, indent=2) + "\n")
