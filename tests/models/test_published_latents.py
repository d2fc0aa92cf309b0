"""Published models with latent attention: what their settings mean, and tiny ones of them beside transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from pd_cluster.models.registry import choose_implementation, resolve_spec
from tests.models.published_latents import PUBLISHED, tiny
from tests.worker.conftest import save_model
from tests.worker.driver import make_executor, random_prompts
from tests.worker.scheduled import ScheduledWorker, largest_error

CACHED = {  # bytes of a token in bfloat16, layers without experts, heads' numbers times their factor on scores
    "DeepSeek-V2-Lite": (31_104, 1, 1.589_6),
    "Moonlight-16B-A3B": (31_104, 1, 1.0),
    "GLM-4.7-Flash": (54_144, 1, 1.0),
    "Mistral-Small-4": (23_040, 0, 1.0),  # its `mscale_all_dim` is 1: see the registry
    "DeepSeek-V3": (70_272, 3, 1.873_9),
    "Kimi-K2": (70_272, 1, 1.813_2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_settings_mean_what_is_known_of_the_model(name: str) -> None:
    spec, described = choose_implementation(Path(), PUBLISHED[name], "auto")
    assert (spec.modules, described) == (None, "")
    (group,), num_bytes = spec.kv_groups(64, "bfloat16"), CACHED[name][0]
    assert group.block_bytes == 64 * num_bytes
    assert spec.experts is not None
    assert len(spec.experts.dense_layers) == CACHED[name][1]
    assert spec.attention_scale * spec.head_dim**0.5 == pytest.approx(CACHED[name][2], rel=1e-3)
    assert spec.rope.attention_factor == 1.0


@pytest.mark.parametrize("name", PUBLISHED)
def test_tiny_ones_have_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Beyond the original context, in chunks of odd sizes beside decodes. The config is the published one's."""
    settings = tiny(name)
    kind = settings["architectures"][0].removesuffix("ForCausalLM")
    saved = save_model(kind, tmp_path, {one: settings[one] for one in settings if one != "model_type"})
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert resolve_spec(tmp_path, settings).latent is not None
    assert isinstance(saved.model, getattr(transformers, settings["architectures"][0]))
    worker = ScheduledWorker(make_executor(tmp_path, num_blocks=60), budget=37)
    for number, ids in enumerate(random_prompts((1, 5, 64, 75, 130), settings["vocab_size"])):
        worker.add(f"{number}", ids, max_tokens=9 + number)
    worker.run()
    worker.executor.close()
    assert largest_error(worker, saved.model) < 1e-5
