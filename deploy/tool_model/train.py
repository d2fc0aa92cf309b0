"""Train the tool model: a Qwen3 of 0.34 million parameters that copies from question to call, from result to answer."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from conversations import THINK_ANSWER, THINK_CALL, Conversations, Message, call_text
from tokenizer import CONTEXT, SPECIAL, VOCAB_SIZE
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class TrainConfig:
    """What the training run is made of; the defaults are those of the committed weights."""

    steps: tuple[int, ...] = (1200, 1100, 900)  # of each cycle
    rows: int = 16  # conversations of a step
    learning_rate: float = 4e-3  # of the embedding and the gains
    matrix_rate: float = 0.02
    warmup_steps: int = 50
    decay_from: float = 0.4  # of the run, from where its learning rate falls to zero
    seed: int = 1


def model_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    """The architecture: 4 query heads on 4 KV heads of 32."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(SPECIAL[2]),
        pad_token_id=tokenizer.convert_tokens_to_ids(SPECIAL[0]),
        attn_implementation="sdpa",
    )


class Rows:
    """Makes rows of token ids and weights: only what the assistant says is learned."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.tokenizer, self.source = tokenizer, Conversations(seed)
        self.sorted: list[tuple[list[int], list[float]]] = []

    def row(self) -> tuple[list[int], list[float]]:
        messages, tools, thinks = self.source.draw()
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not thinks:
            return self._joined(messages, tools, answers, "")
        last = self.source.rng.choice(answers)  # a history holds no reasoning
        return self._joined(
            messages[: last + 1], tools, [last], THINK_CALL if "tool_calls" in messages[last] else THINK_ANSWER
        )

    def _joined(
        self, messages: list[Message], tools: list[dict[str, Any]], learned: list[int], thought: str
    ) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []

        def add(text: str, weight: float) -> None:
            new = self.tokenizer.encode(text, add_special_tokens=False)
            ids.extend(new)
            weights.extend([weight] * len(new))

        if tools:
            add(tools_text(tools), 0.0)
        for i, message in enumerate(messages):
            add(f"<|im_start|>{message['role']}\n", 0.0)
            weight = float(i in learned)
            if weight and thought:
                add("<think>\n", 0.0)
                add(f"{thought}</think>\n\n", weight)
            add(said(message), weight)
            add("<|im_end|>", weight)
            add("\n", 0.0)
        return ids, weights

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of like length, padded with id 0 and weight 0."""
        if not self.sorted:
            self.sorted = sorted((self.row() for _ in range(16 * rows)), key=lambda row: len(row[0]))
        start = self.source.rng.randrange(len(self.sorted) // rows) * rows
        taken, self.sorted[start : start + rows] = self.sorted[start : start + rows], []
        length = max(len(ids) for ids, _ in taken)
        ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in taken])
        return ids, torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in taken])


def tools_text(tools: list[dict[str, Any]]) -> str:
    """The tools as the chat template writes them."""
    functions = [tool["function"] for tool in tools]
    lines = (f"{function['name']}({', '.join(function['parameters']['properties'])})\n" for function in functions)
    return f"<|im_start|>tools\n{''.join(lines)}<|im_end|>\n"


def said(message: Message) -> str:
    """A message's text as the chat template writes it."""
    calls = [call["function"] for call in message.get("tool_calls", [])]  # type: ignore[attr-defined]
    return str(message["content"]) + "\n".join(call_text(call["name"], call["arguments"]) for call in calls)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonal updates; torch's own works in bfloat16, which took four times as long as a step here."""

    def __init__(self, matrices: list[torch.nn.Parameter], rate: float) -> None:
        super().__init__(matrices, {"lr": rate})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.95).add_(p.grad)
                update = orthogonal(p.grad + 0.95 * momentum)
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest orthogonal matrix, by five Newton-Schulz steps of the fifth order."""
    flat = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = flat / (flat.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def train(
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    config: TrainConfig,
    log: Path,
    resume: Path | None = None,
    first: int = 0,
) -> None:
    """Train from cycle `first` on, and save to `target` after each; `resume` has the weights of the one before."""
    torch.manual_seed(config.seed)
    if resume is None:
        model = Qwen3ForCausalLM(model_config(tokenizer))
    else:
        model = Qwen3ForCausalLM.from_pretrained(resume, dtype=torch.float32)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    for cycle in range(first, len(config.steps)):
        train_cycle(model, Rows(tokenizer, config.seed + cycle), cycle, config, log)
        save(model, target)


def train_cycle(model: Qwen3ForCausalLM, rows: Rows, cycle: int, config: TrainConfig, log: Path) -> None:
    """One rise and fall of the learning rates."""
    embedding = model.model.embed_tokens.weight
    matrices = [p for p in model.parameters() if p.ndim > 1 and p is not embedding]
    others = [embedding, *(p for p in model.parameters() if p.ndim <= 1)]
    optimizers = [
        Muon(matrices, config.matrix_rate),
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    start, steps = time.monotonic(), config.steps[cycle]
    for step in range(steps):
        fall = (1.0 - step / steps) / (1.0 - config.decay_from)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * min((step + 1) / config.warmup_steps, 1.0, max(0.02, fall))
        loss, right = learn(model, *rows.batch(config.rows))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            seconds = round(time.monotonic() - start)
            record = {"cycle": cycle, "step": step, "loss": round(loss, 4), "right": round(right, 4), "s": seconds}
            print(json.dumps(record), flush=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def learn(model: Qwen3ForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> tuple[float, float]:
    """Add the gradients of a batch. Returns its loss and the share of tokens predicted right."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    keep = weights[:, 1:] > 0
    logits, wanted = model.lm_head(hidden[keep]), ids[:, 1:][keep]
    loss = functional.cross_entropy(logits, wanted)
    loss.backward()
    return loss.item(), (logits.argmax(-1) == wanted).float().mean().item()


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
