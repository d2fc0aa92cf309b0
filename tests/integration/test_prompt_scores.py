"""Log-probabilities of prompts through the router, in both orders, beside transformers'; and lm-eval itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.integration.reference import DEMO_MODEL, DemoModel
from tests.integration.system import Path, System

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TEXTS = (
    "Mira 4831. Oskar 2210. Once upon a time there was a small dog in the garden.",
    "The old man walked to the river.",
    "It was cold and the wind was strong. " * 8,
)


def scores_of(model: Any, prompt: Sequence[int]) -> list[float]:
    """transformers' log-probability of each token but the first."""
    with torch.inference_mode():
        rows = model(torch.tensor([list(prompt)])).logits[0].log_softmax(-1)
    return [float(row[token_id]) for row, token_id in zip(rows, prompt[1:], strict=False)]


@pytest.mark.parametrize("path", [Path.P_FIRST, Path.D_FIRST])
def test_prompts_are_scored_in_every_order(shared_system: System, demo_model: DemoModel, path: Path) -> None:
    """What lm-eval sends, then the same prompts with more tokens: cold, and with every node's cache warm."""
    prompts = [demo_model.tokenizer.encode(text) for text in TEXTS]
    expected = [scores_of(demo_model._model, prompt) for prompt in prompts]
    scored = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    more = {"prompt_logprobs": 1, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": False}
    requests = [("/v1/completions", scored)]
    requests += [("/v1/completions", more | {"prompt": prompt}) for prompt in prompts]
    for _ in range(2):
        whole, *each = shared_system.ask_all(path, requests)
        for choice, prompt, own in zip(whole.choices, prompts, expected, strict=True):
            found = choice["logprobs"]["token_logprobs"]
            assert (len(found), found[0]) == (len(prompt) + 1, None)
            assert found[1:-1] == pytest.approx(own, abs=1e-4)
        for answer, prompt, own in zip(each, prompts, expected, strict=True):
            (choice,) = answer.choices
            told = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
            assert [entry[str(token_id)]["logprob"] for entry, token_id in told] == pytest.approx(own, abs=1e-4)
            assert answer.body["usage"]["completion_tokens"] == 8


@pytest.mark.slow
def test_lm_eval_scores_as_its_hf_backend(shared_system: System) -> None:
    """Log-likelihoods and greediness of the package's `local-completions`, with either tokenizer, beside its `hf`."""
    instance = pytest.importorskip("lm_eval.api.instance", reason="needs the package lm_eval")
    hf = pytest.importorskip("lm_eval.models.huggingface", reason="needs the package accelerate")
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="needs the package lm_eval")

    texts = [text.strip() for text in TEXTS]
    cuts = [(text.index(" "), text.rindex(" ", 0, len(text) // 2 + 1), text.rindex(" ")) for text in texts]
    pairs = [(text[:cut], text[cut:]) for text, some in zip(texts, cuts, strict=True) for cut in some]
    asked = [instance.Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    expected = hf.HFLM(pretrained=str(DEMO_MODEL), dtype="float32", device="cpu").loglikelihood(asked)
    for path in (Path.P_FIRST, Path.D_FIRST):
        for backend in ("huggingface", "remote"):
            client = completions.LocalCompletionsAPI(
                base_url=f"{shared_system.router_url}/v1/completions", model="demo_model",
                tokenizer=str(DEMO_MODEL) if backend == "huggingface" else None, tokenizer_backend=backend,
                num_concurrent=4, header={"x-pd-route": path.value},
            )  # fmt: skip
            found = client.loglikelihood(asked)
            assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-4)
            assert [one[1] for one in found] == [one[1] for one in expected]
