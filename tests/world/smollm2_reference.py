"""What transformers makes of SmolLM2 in float32: tokens, log-probabilities, distributions, hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.world import real_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TIE = 1e-4  # two best logits closer than this may come out in either order


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and its greedy continuation, up to the end of the turn or the first near tie."""

    prompt: tuple[int, ...]
    messages: tuple[dict[str, str], ...]  # those of a chat
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    has_tie: bool


class SmolLM2:
    """The model under transformers."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        self.model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).to(device)
        self.model.eval()
        self.eos: int = self.model.config.eos_token_id

    def prompts(self) -> list[tuple[tuple[int, ...], tuple[dict[str, str], ...]]]:
        """Token ids of all, and messages of those that are chats."""
        texts = [*real_prompts.QUESTIONS, *real_prompts.CODE, *real_prompts.SCRIPTS, *real_prompts.EMOJI]
        plain = [(tuple(self.tokenizer.encode(text)), ()) for text in [*texts, *real_prompts.long_texts()]]
        return [*plain, *((self.chat_prompt(messages), tuple(messages)) for messages in real_prompts.CHATS)]

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.inference_mode()
    def continued(
        self, prompt: Sequence[int], messages: tuple[dict[str, str], ...], num_tokens: int
    ) -> Continuation:
        """Greedy, one token after the other."""
        tokens: list[int] = []
        logprobs: list[float] = []
        feed, past, has_tie = torch.tensor([list(prompt)]), None, False
        while len(tokens) < num_tokens and self.eos not in tokens and not has_tie:
            out = self.model(feed.to(self.model.device), past_key_values=past, use_cache=True, logits_to_keep=1)
            row, past = out.logits[0, -1], out.past_key_values
            best = row.topk(2)
            has_tie = float(best.values[0] - best.values[1]) < TIE
            if not has_tie:
                tokens.append(int(best.indices[0]))
                logprobs.append(float(row.log_softmax(-1)[tokens[-1]]))
                feed = torch.tensor([tokens[-1:]])
        return Continuation(tuple(prompt), messages, tuple(tokens), tuple(logprobs), has_tie)

    @torch.inference_mode()
    def scores(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probability of each token but the first."""
        rows = self.model(torch.tensor([list(ids)], device=self.model.device)).logits[0, :-1].float().log_softmax(-1)
        told: torch.Tensor = rows.gather(1, torch.tensor(ids[1:], device=rows.device)[:, None])[:, 0]
        return told

    @torch.inference_mode()
    def next_probabilities(self, ids: Sequence[int]) -> torch.Tensor:
        """Of the token that follows, float64."""
        row = self.model(torch.tensor([list(ids)], device=self.model.device), logits_to_keep=1).logits[0, -1]
        probabilities: torch.Tensor = row.double().softmax(-1)
        return probabilities

    @torch.inference_mode()
    def last_state(self, ids: Sequence[int]) -> torch.Tensor:
        """The last token's last hidden state, of length 1."""
        state = self.model.model(torch.tensor([list(ids)])).last_hidden_state[0, -1]
        normed: torch.Tensor = state / state.norm()
        return normed
