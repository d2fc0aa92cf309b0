"""What transformers generates: the tokens that every path through the cluster must reproduce."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import count
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pd_cluster.server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

DEMO_MODEL = FilePath(__file__).resolve().parents[2] / "pd_cluster" / "demo_model"
VOCAB_SIZE = 3072  # the demo model's
NUM_NEW_TOKENS = 32
TIE = 1e-4  # two best logits closer than this may come out in either order
MAX_BATCH_TOKENS = 8192  # of one call of `generate`
MAX_PADDING = 1000  # tokens in it; another call costs as much
# (length, how many): around a block's edge, then enough for several chunks, then nearly all that the model can read
LENGTHS = ((1, 20), (15, 30), (16, 30), (17, 30), (33, 15), (64, 10), (100, 15), (160, 10), (255, 12), (300, 8),
           (512, 8), (801, 6), (1300, 3), (3500, 3))  # fmt: skip
NAMES = ("Mira", "Oskar", "Lena", "Zoe", "Anton", "Ida", "Jonas", "Nora", "Emil", "Clara", "Felix", "Greta")
SENTENCES = (
    "The old man walked to the river.", "A small dog was in the garden.", "She opened the door and looked out.",
    "It was cold and the wind was strong.", "They had bread and tea in the kitchen.",
)  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """One prompt and its greedy continuation, end-of-turn tokens and all. One entry of each list per new token."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]  # between the two best logits

    def until(self, token_id: int) -> Reference:
        """The same, cut after the first `token_id`."""
        end = self.tokens.index(token_id) + 1 if token_id in self.tokens else len(self.tokens)
        return Reference(self.prompt, self.tokens[:end], self.logprobs[:end], self.gaps[:end])


class DemoModel:
    """The demo model under transformers, float32 on CPU, and the names that the API gives its tokens."""

    def __init__(self, directory: str | FilePath = DEMO_MODEL) -> None:
        """`directory`: of another model with its tokens."""
        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        self.eos_token_id: int = self._model.config.eos_token_id
        assert self._model.config.vocab_size == VOCAB_SIZE
        vocabulary = Tokenizer(self.tokenizer)
        self._bytes = [vocabulary.token_bytes(token_id) for token_id in range(VOCAB_SIZE)]
        vocabulary.close()
        self._ids = {_api_name(raw): token_id for token_id, raw in enumerate(self._bytes)}
        assert len(self._ids) == VOCAB_SIZE, "two tokens look alike in the API"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self.tokenizer.encode(text))

    def token_ids(self, names: Iterable[str]) -> list[int]:
        """Ids of tokens as the logprobs of /v1/completions name them."""
        return [self._ids[name] for name in names]

    def text(self, token_ids: Iterable[int]) -> str:
        """What a client reads of these tokens."""
        special = set(self.tokenizer.all_special_ids)
        return b"".join(self._bytes[i] for i in token_ids if i not in special).decode(errors="replace")

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation through the model's template."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.encode(text)

    def generate(self, prompts: Sequence[Sequence[int]], num_new_tokens: int = NUM_NEW_TOKENS) -> list[Reference]:
        """Greedy continuations that do not stop at the end of the turn. Prompts of similar lengths share a batch."""
        lengths = {index: len(prompt) for index, prompt in enumerate(prompts)}
        found: dict[int, Reference] = {}
        for some in _batches(lengths, num_new_tokens):
            references = self._generate_batch([prompts[i] for i in some], num_new_tokens)
            found.update(zip(some, references, strict=True))
        return [found[index] for index in range(len(prompts))]

    def _generate_batch(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> list[Reference]:
        """Shorter prompts have padding before them, to which no token attends."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out: Any = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=num_new_tokens, do_sample=False,
                eos_token_id=None, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        tokens = out.sequences[:, ids.shape[1] :]
        logits = torch.stack(out.logits, 1)  # [prompt, new token, vocabulary]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        best = logits.topk(2).values
        rows = zip(prompts, tokens.tolist(), logprobs.tolist(), (best[..., 0] - best[..., 1]).tolist(), strict=True)
        return [Reference(tuple(p), tuple(t), tuple(lp), tuple(g)) for p, t, lp, g in rows]


def make_prompts(model: DemoModel, seed: int) -> list[list[int]]:
    """200 prompts of LENGTHS, facts with a question at their end alternating with random ids.

    No two begin with the same block, so that none finds another one's in a prefix cache.
    """
    rng = random.Random(seed)
    beginnings: set[tuple[int, ...]] = set()
    prompts: list[list[int]] = []
    for length, how_many in LENGTHS:
        for index in range(how_many):
            for attempt in count():
                is_recall = index % 2 and attempt < 10
                prompt = recall_prompt(model, rng, length) if is_recall else random_prompt(rng, length)
                if tuple(prompt[:16]) not in beginnings:
                    break
            beginnings.add(tuple(prompt[:16]))
            prompts.append(prompt)
    rng.shuffle(prompts)
    return prompts


def recall_prompt(model: DemoModel, rng: random.Random, length: int) -> list[int]:
    """Facts and sentences, then a question about one of the facts, cut at the front to `length` tokens."""
    pieces: list[str] = []
    ids: list[int] = []
    while len(ids) < length:
        for _ in range(1 + length // 8):
            fact = f"{rng.choice(NAMES)} {rng.randrange(10_000):04d}."
            pieces.append(fact if rng.random() < 0.7 else rng.choice(SENTENCES))
        ids = model.encode(" ".join([*pieces, f"{rng.choice(NAMES)}?"]))
    return ids[-length:]


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Any ids but the special ones."""
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def _batches(lengths: Mapping[int, int], num_new_tokens: int) -> Iterator[list[int]]:
    """Names of prompts, given with their lengths, in batches of limited size and padding."""
    batch: list[int] = []
    for index in sorted(lengths, key=lengths.__getitem__):
        padding = sum(lengths[index] - lengths[one] for one in batch)
        num_tokens = (len(batch) + 1) * (lengths[index] + num_new_tokens)
        if batch and (padding > MAX_PADDING or num_tokens > MAX_BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _api_name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
