"""Log-probabilities of prompts through the router, in both orders, beside transformers'; and lm-eval itself."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import rms_norm

from tests.integration.system import Path, System
from tests.shallow_model import shallow_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.integration.reference import DemoModel

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
logger = logging.getLogger(__name__)

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


def computing_in_float64(model: Any) -> None:
    """transformers' norms compute in float32 in a model of any type: let these of a float64 model compute in its own.

    The tables of angles stay float32: every implementation begins with them.
    """
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            weight, eps = module.weight, module.variance_epsilon
            module.forward = partial(rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)


@pytest.mark.slow
def test_lm_eval_scores_as_its_hf_backend(shared_system: System) -> None:
    """Log-likelihoods and greediness of the package's `local-completions`, with either tokenizer, beside its `hf`.

    The truth is the same model in float64. Two float32 implementations that add in different orders are each off by
    their own error, and at a sum of -558 the error of `hf` alone comes to 1e-4 on some machines. So ours is held to
    the truth, and is then as near to `hf` as that and the error of `hf` together.
    """
    instance = pytest.importorskip("lm_eval.api.instance", reason="needs the package lm_eval")
    hf = pytest.importorskip("lm_eval.models.huggingface", reason="needs the package accelerate")
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="needs the package lm_eval")

    texts = [text.strip() for text in TEXTS]
    cuts = [(text.index(" "), text.rindex(" ", 0, len(text) // 2 + 1), text.rindex(" ")) for text in texts]
    pairs = [(text[:cut], text[cut:]) for text, some in zip(texts, cuts, strict=True) for cut in some]
    asked = [instance.Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    # lm-eval 0.4.13 takes the sums of pairs that make up the same text from one pair's, unless the cache is off
    options = {"pretrained": shallow_model(), "device": "cpu", "logits_cache": False}
    expected = hf.HFLM(dtype="float32", **options).loglikelihood(asked)
    exact = hf.HFLM(dtype="float64", **options)
    computing_in_float64(exact.model)
    truth = exact.loglikelihood(asked)
    for path in (Path.P_FIRST, Path.D_FIRST):
        for backend in ("huggingface", "remote"):
            client = completions.LocalCompletionsAPI(
                base_url=f"{shared_system.router_url}/v1/completions", model="demo_model",
                tokenizer=shallow_model() if backend == "huggingface" else None, tokenizer_backend=backend,
                num_concurrent=4, header={"x-pd-route": path.value},
            )  # fmt: skip
            found = client.loglikelihood(asked)
            sums = [[one[0] for one in some] for some in (found, expected, truth)]
            logger.info("%s, %s: ours, hf's and the exact sums: %s", path, backend, list(zip(*sums, strict=True)))
            assert sums[0] == pytest.approx(sums[2], rel=0, abs=1e-4)
            for ours, theirs, right in zip(*sums, strict=True):
                assert abs(ours - theirs) <= 1e-4 + abs(theirs - right)
            assert [one[1] for one in found] == [one[1] for one in expected] == [one[1] for one in truth]
