"""Train the demo model: Qwen3 architecture, recall by a curriculum, English beside it."""

from __future__ import annotations

import json
import multiprocessing
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from recall import DIGIT_WEIGHT, LEVELS, BatchStream, build_lexicon
from tokenizer import CONTEXT, END_OF_TEXT, IM_END, VOCAB_SIZE
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class TrainConfig:
    """What the training run is made of; the defaults are those of the published weights."""

    steps: int = 4000
    max_seconds: float = 480.0  # the learning rate falls to zero by whichever of the two ends first
    tokens_per_step: int = 131_072
    english_rows: int = 192
    num_documents: int = 40_000
    num_workers: int = 12
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    decay_from: float = 0.5  # of the run
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


def train(tokenizer: PreTrainedTokenizerBase, target: Path, config: TrainConfig, log: Path) -> None:
    """Train and save bfloat16 weights to `target`; one JSON line per hundred steps goes to `log`."""
    torch.manual_seed(config.seed)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    model = Qwen3ForCausalLM(model_config(tokenizer)).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    optimizer = _optimizer(model, config, cuda)
    level = multiprocessing.Value("i", 0)
    lexicon = build_lexicon(tokenizer, config.num_documents, config.seed)
    stream = BatchStream(lexicon, level, config.tokens_per_step, config.english_rows, config.seed)
    loader = DataLoader(stream, batch_size=None, num_workers=config.num_workers, pin_memory=cuda)
    autocast = torch.autocast("cuda", dtype=torch.bfloat16) if cuda else nullcontext()
    start, average, step, records = time.monotonic(), 0.0, 0, []
    for at_level, *arrays in loader:
        ids, weights, english_ids, english_weights = (array.to(device, non_blocking=True) for array in arrays)
        progress = max(step / config.steps, (time.monotonic() - start) / config.max_seconds)
        if progress >= 1.0:
            break
        rate = min((step + 1) / config.warmup_steps, 1.0, max(0.02, (1.0 - progress) / (1.0 - config.decay_from)))
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate
        with autocast:
            loss, right = weighted_loss(model, ids, weights)
            loss.backward()
            english_loss, _ = weighted_loss(model, english_ids, english_weights)
            (0.5 * english_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if at_level == level.value:
            average = 0.8 * average + 0.2 * float(right)
            if average > config.threshold and level.value < len(LEVELS) - 1:
                level.value, average = level.value + 1, 0.0
                print(f"step {step}: level {level.value}, {time.monotonic() - start:.0f} s", flush=True)
        if step % 100 == 0:
            records.append({"step": step, "level": at_level, "loss": round(float(loss), 4), "digits": round(average, 4),
                            "english_loss": round(float(english_loss), 4), "s": round(time.monotonic() - start, 1)})
            print(json.dumps(records[-1]), flush=True)
            log.write_text("".join(json.dumps(record) + "\n" for record in records))
        step += 1
    print(f"{step} steps in {time.monotonic() - start:.0f} s", flush=True)
    save(model, target)


def save(model: Qwen3ForCausalLM, target: Path) -> None:
    """Save as bfloat16; the tokenizer is there already."""
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.to(torch.bfloat16).save_pretrained(target)
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where transformers 4 looks for it
    path.write_text(json.dumps(config, indent=2) + "\n")
