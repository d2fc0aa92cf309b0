"""YaRN in every family: transformers' frequencies, logits and tokens, after the original context too."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.config_reader import ConfigReader
from pd_cluster.models.fingerprint import fingerprint
from pd_cluster.models.registry import ARCHITECTURES, choose_implementation, resolve_spec
from pd_cluster.models.rope import make_rope_table, rope_frequencies
from pd_cluster.models.rope_kinds import ROPE_KINDS
from pd_cluster.protocol.sampling_params import SamplingParams
from tests.models.state_models import STATE_MODELS, load
from tests.models.state_steps import Chunk, StateSteps
from tests.models.test_scaled_contexts import GEMMA, HERE, LLAMA
from tests.worker.conftest import GEMMA3_ROPE, MODELS, VOCAB_SIZE, save_model
from tests.worker.driver import Driver, make_executor, random_prompts
from tests.worker.watched_executor import WatchedExecutor

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.models.spec import RopeSpec

ORIGINAL = 64
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
ROPES: dict[str, dict[str, Any]] = {
    "llama": {**YARN, "beta_fast": 8, "beta_slow": 0.5},
    "mistral-window": {**YARN, "truncate": False},
    "qwen2": {**YARN, "attention_factor": 1.5},
    "qwen3": YARN,
    "qwen3-experts": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0},
    "qwen2-shared-expert": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "mixtral": {**YARN, "factor": 2.5},
    "glm4-experts": YARN,
    "minimax-m2": {**YARN, "partial_rotary_factor": 0.5, "truncate": False},
    "gemma3": {**GEMMA3_ROPE, "full_attention": YARN},
    "gpt-oss": {**YARN, "truncate": False},
    "deepseek-v2": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "deepseek-v3": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": False},
    "glm4-lite": YARN,
    "mistral4": {
        **YARN,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 0.4,
    },
}  # fmt: skip
PART: dict[str, Any] = {**YARN, "partial_rotary_factor": 0.5}
STATE_ROPES: dict[str, dict[str, Any]] = {
    "qwen3-next": PART,
    "qwen3.5": {**PART, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    "qwen3.5-experts": {**PART, "truncate": False, "mrope_section": [2, 1, 1]},
}
LENGTHS = (5, 16, 63, 66, 120)  # around the block and the original context
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)  # 63 and 5 tokens pass the original context
GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
           "original_max_position_embeddings": 4096}  # fmt: skip


def test_every_family_has_yarn_here() -> None:
    kinds = [*(MODELS[name][0] for name in ROPES), *(STATE_MODELS[name][0] for name in STATE_ROPES)]
    assert {f"{kind}ForCausalLM" for kind in kinds} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", list(ROPES))
def test_logits_and_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    """Chunks of 23 tokens beside decodes; then a prompt that goes on from cached blocks of another one."""
    kind, options = MODELS[name]
    changes = {"rope_parameters": deepcopy(ROPES[name]), "max_position_embeddings": ORIGINAL}  # they are changed
    changes |= {"head_dim": 8} if name == "mixtral" else {}  # without it transformers fails
    changes |= {"attention_bias": False} if name == "gpt-oss" else {}  # its published models have the biases
    saved = save_model(kind, tmp_path, {**options, **changes})
    executor = make_executor(tmp_path)
    assert executor.model.max_model_len == ORIGINAL * (2.5 if name == "mixtral" else 4)
    watched = WatchedExecutor(executor)
    driver = Driver(watched, budget=23)  # type: ignore[arg-type]
    for prompt in random_prompts(LENGTHS, VOCAB_SIZE):
        driver.add(prompt, GREEDY)
    while len(driver.sequences[-1].tokens) < GREEDY.max_tokens - 2:
        driver.step()
    first = driver.sequences[-1]
    again = driver.add([*first.all_ids[:122], 9, 8], GREEDY, prefix_of=first)
    assert again.computed == 112 > ORIGINAL
    driver.run()
    for generation in driver.sequences:
        with torch.inference_mode():
            logits = saved.model(torch.tensor([generation.all_ids[:-1]]), use_cache=False).logits[0]
        expected, found = logits[len(generation.prompt) - 1 :], torch.stack(watched.logits[generation.seq_id])
        assert (found - expected).abs().max() <= 1e-5 * expected.std()
        assert generation.all_ids[len(generation.prompt) :] == expected.argmax(-1).tolist()
    executor.close()


@pytest.mark.parametrize("name", list(STATE_ROPES))
def test_logits_of_models_with_states_equal_transformers(tmp_path: Path, name: str) -> None:
    kind, options = STATE_MODELS[name]
    changes = {"rope_parameters": deepcopy(STATE_ROPES[name]), "max_position_embeddings": ORIGINAL}
    saved, (ids,) = save_model(kind, tmp_path, {**options, **changes}), random_prompts(LENGTHS[-1:], VOCAB_SIZE)
    model = load(tmp_path)
    assert model.spec.max_len == ORIGINAL * 4
    found = StateSteps(model).step(Chunk(ids, 0, list(range(8)), 0))
    with torch.inference_mode():
        expected = saved.model(torch.tensor([ids])).logits[0]
    assert (found - expected).abs().max() <= 1e-4 * expected.std()


def read(settings: dict[str, Any], theta: float, max_len: int) -> RopeSpec:
    return ROPE_KINDS["yarn"].read(ConfigReader(HERE, settings, "rope_scaling"), theta, max_len)


def test_frequencies_and_factors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    draw = random.Random(5)
    for _ in range(300):
        settings: dict[str, Any] = {
            "factor": draw.choice([1.0, 1.5, 4.0, 32, 40.0, 128.0]),
            "original_max_position_embeddings": draw.choice([4, 64, 4096, 8192, 262144]),
        }
        choices = {
            "beta_fast": (1, 8, 32.0, None), "beta_slow": (0.25, 1, None), "mscale": (0, 0.707, 1.0, None),
            "mscale_all_dim": (0, 0.707, 1.0), "truncate": (True, False, None),
            "attention_factor": (0.5, 1.0, 2.0, None),
        }  # fmt: skip
        settings |= {name: draw.choice(values) for name, values in choices.items() if draw.random() < 0.5}
        theta, dim, part = draw.choice([1e4, 150000.0, 8e6]), draw.choice([16, 64, 96, 128]), draw.choice([1.0, 0.5])
        rope = {"rope_type": "yarn", "rope_theta": theta, "partial_rotary_factor": part, **settings}
        config = LlamaConfig(head_dim=dim, hidden_size=256, max_position_embeddings=1 << 20, rope_parameters=rope)
        expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        spec = read(settings, theta, 1 << 20)
        assert spec.attention_factor == factor, settings
        torch.testing.assert_close(rope_frequencies(spec, int(dim * part)), expected, rtol=3e-7, atol=0)


def test_the_table_of_gpt_oss_is_that_of_transformers_up_to_the_last_position() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    config = GptOssConfig(rope_parameters={**GPT_OSS, "rope_theta": 150000.0}, head_dim=64)
    positions = torch.tensor([0, 1, 4095, 4096, 50000, 131071])
    cos, sin = GptOssRotaryEmbedding(config)(torch.zeros(1), positions[None])
    spec = read(GPT_OSS, 150000.0, 131072)
    assert spec.attention_factor == pytest.approx(1.3465736)
    table = make_rope_table(spec, 64, 131072, torch.float32, torch.device("cpu")).at(positions)
    assert torch.equal(table.cos, cos[0])
    assert torch.equal(table.sin, sin[0])


@pytest.mark.parametrize(
    ("config", "length", "factor"),
    [
        # Qwen3's cards; Qwen2.5's, with 32768 in the config; Yarn-Llama-2-13b-64k; DeepSeek-V3's settings; gpt-oss's
        ({"max_position_embeddings": 40960, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072, 1.13862944),
        ({"max_position_embeddings": 32768, "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072, 1.13862944),
        ({"max_position_embeddings": 65536, "rope_scaling": {
            "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "finetuned": True,
            }}, 65536, 1.27725887),
        ({"max_position_embeddings": 163840, "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}}, 163840, 1.0),
        ({"max_position_embeddings": 131072, "rope_scaling": GPT_OSS}, 131072, 1.3465736),
        ({"max_position_embeddings": 16384, "rope_scaling": {
            "type": "yarn", "factor": None, "original_max_position_embeddings": 4096}}, 16384, 1.13862944),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 16384, 1.13862944),
        ({"max_position_embeddings": 4096, "original_max_position_embeddings": 2048, "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}, 16384, 1.13862944),
    ],
)  # fmt: skip
def test_published_settings(config: dict[str, Any], length: int, factor: float) -> None:
    from transformers import LlamaConfig

    spec, line = choose_implementation(HERE, {**LLAMA, **config}, "auto")
    assert (spec.max_len, spec.rope.kind, line) == (length, "yarn", "")
    assert spec.rope.attention_factor == pytest.approx(factor)
    parsed = LlamaConfig.from_dict(deepcopy({**LLAMA, **config})).rope_parameters
    assert spec.rope.original_max_len == parsed["original_max_position_embeddings"]


def test_the_layers_of_gemma_with_full_attention_have_the_longer_context() -> None:
    yarn = {**YARN, "factor": 4.0, "original_max_position_embeddings": 131072}
    nested = {"rope_parameters": {**GEMMA3_ROPE, "full_attention": yarn}}
    for rope in (nested, {"rope_scaling": yarn}):
        spec = resolve_spec(HERE, {**GEMMA, **rope})
        assert spec.window_rope is not None
        assert (spec.max_len, spec.rope.kind, spec.window_rope.kind) == (524288, "yarn", "default")


@pytest.mark.parametrize("truncate", [False, None])
def test_yarn_of_a_layer_type_that_is_not_truncated_is_refused(truncate: bool | None) -> None:
    """transformers 5.23 reads the setting beside the layer types: it computes with true."""
    yarn = {**YARN, "truncate": truncate}
    for rope in ({"rope_parameters": {**GEMMA3_ROPE, "full_attention": yarn}}, {"rope_scaling": yarn}):
        with pytest.raises(StartupError, match="YaRN of a layer type has `truncate` true"):
            resolve_spec(HERE, {**GEMMA, **rope})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": None, "original_max_position_embeddings": None}, "factor must be a number of at least 1, not None"),
        ({"factor": "4"}, "factor must be a number of at least 1, not '4'"),
        ({"factor": 0.5}, r"factor must be a number of at least 1, not 0\.5"),
        ({"factor": float("nan")}, "factor must be a number of at least 1, not nan"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings must be a positive integer, not 0"),
        ({"beta_fast": 0}, "beta_fast must be a number of at least 1, not 0"),
        ({"beta_fast": 2, "beta_slow": 3}, "beta_fast must be a number of at least 3, not 2"),
        ({"beta_slow": "x"}, "beta_slow must be a positive number, not 'x'"),
        ({"attention_factor": 0}, "attention_factor must be a positive number, not 0"),
        ({"mscale": "1"}, "mscale must be a positive number, not '1'"),
        ({"mscale_all_dim": -1}, "mscale_all_dim must be a positive number, not -1"),
        ({"truncate": "no"}, "truncate must be true or false, not 'no'"),
        ({"truncate": 0}, "truncate must be true or false, not 0"),
        ({"rope_theta": 1.0}, "rope_theta must be a number of at least 2, not 1"),
    ],
)
def test_wrong_settings_are_named_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=rf"^model/config\.json: rope_scaling\.{message}") as caught:
        choose_implementation(HERE, {**LLAMA, "rope_scaling": {**YARN, **changes}}, "auto")
    assert "\n" not in str(caught.value)


def test_another_yarn_is_another_model() -> None:
    """Its KV means something else, so a router pairs no nodes of the two."""

    def of(**changes: Any) -> str:
        return fingerprint(resolve_spec(HERE, {**LLAMA, "rope_scaling": {**YARN, **changes}}), "dummy")

    changes: list[dict[str, Any]] = [
        {}, {"factor": 8.0}, {"original_max_position_embeddings": 32}, {"beta_fast": 16}, {"beta_slow": 2},
        {"attention_factor": 1.2}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"truncate": False}, {"rope_theta": 5e5},
    ]  # fmt: skip
    assert len({of(**change) for change in changes}) == len(changes)
    default = {"beta_fast": 32.0, "beta_slow": 1, "truncate": True, "mscale": 0, "attention_factor": None}
    assert of(**default) == of()
    assert of() != fingerprint(resolve_spec(HERE, LLAMA), "dummy")
