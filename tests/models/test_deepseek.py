"""Models with latent attention: what is stored, handed over, widened and refused."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.shapes import CONFIGS
from pd_cluster.errors import StartupError, UnservedModel
from pd_cluster.models.fingerprint import fingerprint
from pd_cluster.models.registry import build_model, resolve_spec
from pd_cluster.worker.model_loading import resolve_kv_dtype
from pd_connectors.protocol.layout import BlockLayout, KVKind
from tests.models.paged_steps import serve_steps
from tests.models.rank_weights import UNROUNDED
from tests.models.state_models import load
from tests.models.test_cut_models import check_equal
from tests.models.thread_ranks import run_ranks
from tests.worker.conftest import MODELS, SavedModel
from tests.worker.driver import Driver, make_executor, random_prompts
from tests.worker.quantized_models import BLOCKS, MISTRAL, QuantizedCase, compressed, save_quantized
from tests.worker.watched_executor import WatchedExecutor

if TYPE_CHECKING:
    from pd_cluster.models.spec import ModelSpec

CPU = torch.device("cpu")
FLASH = resolve_spec(Path(), CONFIGS["glm-4.7-flash"])
# Shared experts: 1 or 2 join the others, 4 stay apart.
# A head has 192 + 64 rows, so those that rotate lie in one block. kv_b_proj has 320 a head: ranks cut its blocks
_WIDE = {
    "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 128,
    "q_lora_rank": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 2,
    "topk_group": 1, "n_shared_experts": 4, "first_k_dense_replace": 1, "initializer_range": 0.05,
}  # fmt: skip
_PLAIN = r"lm_head|.*mlp\.gate$"
FLOAT8 = {
    "deepseek-v3": QuantizedCase(
        "DeepseekV3",
        {**BLOCKS, "scale_fmt": "ue8m0"},
        _PLAIN,
        {**_WIDE, "n_shared_experts": 2, "moe_intermediate_size": 256},
    ),
    "moonlight": QuantizedCase("DeepseekV3", BLOCKS, _PLAIN, {**_WIDE, "q_lora_rank": None}),
    "glm4-lite": QuantizedCase(
        "Glm4MoeLite",
        compressed(ignore=("re:.*lm_head", "re:.*mlp.gate$")),
        _PLAIN,
        {**_WIDE, "n_group": 1, "n_shared_experts": 1},
    ),
    "mistral4": QuantizedCase(
        "Mistral4",
        MISTRAL,
        _PLAIN,
        {
            **_WIDE,
            "n_shared_experts": 2,
            "rope_parameters": MODELS["mistral4"][1]["rope_parameters"] | {"partial_rotary_factor": 0.25},
        },
    ),
}
TOLERANCE = 1e-4  # of the logits' deviation, where no row is rounded apart
ROUNDED = 0.3


def spec_of(**settings: Any) -> ModelSpec:
    config = {**CONFIGS["moonlight"], **settings}
    return resolve_spec(Path(), config)


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_handoff_of_glm_4_7_flash_has_so_many_bytes(block_size: int) -> None:
    """8,000 tokens of 47 layers, 576 numbers of 2 bytes each; as many to each rank that reads them."""
    groups = FLASH.kv_groups(block_size, "bfloat16")
    assert [(group.kind, group.sharded) for group in groups] == [(KVKind.LATENT, False)]
    num_bytes = sum(len(group.handed_over(8000)) * group.block_bytes for group in groups)
    assert num_bytes == 8000 * 47 * 576 * 2 == 433_152_000
    for degree in (1, 2, 4):
        layout = BlockLayout(groups, degree)
        assert layout.rank_bytes == layout.block_bytes


def test_weights_of_each_rank_are_counted() -> None:
    """What has no heads is whole on each rank, and what expands latents of a float8 checkpoint is widened."""
    config = CONFIGS["deepseek-v3-5-layers"]
    spec = resolve_spec(Path(), config)
    for num_ranks in (1, 4):
        counted = spec.weight_bytes(2, num_ranks)
        (built,) = run_ranks(1, lambda share: sum_of_weights(spec)) if num_ranks == 1 else (counted,)
        assert counted == pytest.approx(built, rel=0.005)


def sum_of_weights(spec: ModelSpec) -> int:
    """Bytes that one rank has when its weights are loaded."""
    model = build_model(spec, UNROUNDED, 64, torch.bfloat16, torch.device("meta"))
    read = sum(slot.tensor.nbytes for slot in model.slots.values())
    return read + spec.num_layers * spec.latent.expanding(spec.num_heads)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "with latent attention RoPE of type linear"),
        ({"qk_rope_head_dim": 63}, "pairs of numbers rotate"),
        ({"scoring_func": "softmax"}, "only sigmoid"),
        ({"topk_method": "greedy"}, "only noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
    ],
)
def test_what_is_another_model_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnservedModel, match=message):
        spec_of(**settings)


def test_a_float8_cache_of_latents_is_refused_by_name() -> None:
    told = r"--kv-cache-dtype fp8 is not served for DeepseekV3ForCausalLM, which caches latents"
    with pytest.raises(StartupError, match=told):
        resolve_kv_dtype("fp8", "bfloat16", spec_of(), CPU)


def test_nodes_with_another_yarn_do_not_pair() -> None:
    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    specs = [spec_of(), spec_of(rope_scaling=yarn), spec_of(rope_scaling={**yarn, "mscale_all_dim": 0.7})]
    assert len({fingerprint(spec, "dummy") for spec in specs}) == 3


def test_rotating_rows_in_several_quantized_blocks_cannot_move(tmp_path: Path) -> None:
    """Heads of 96 + 64 rows: those of the first one that rotate begin in one block, and end in the next."""
    case = QuantizedCase("DeepseekV3", BLOCKS, _PLAIN, {**_WIDE, "qk_nope_head_dim": 96})
    save_quantized(case, tmp_path)
    with pytest.raises(StartupError, match="lie in several quantized blocks of 128, and cannot move"):
        load(tmp_path)


@pytest.mark.parametrize("name", FLOAT8)
def test_weights_in_float8_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """What expands latents multiplies rows as they are. Of short prompts, most have no sum that is rounded apart."""
    saved = save_quantized(FLOAT8[name], tmp_path)
    for module_name, module in saved.model.named_modules():
        if module_name.endswith("kv_b_proj"):
            module._forward_pre_hooks.clear()
    watched = WatchedExecutor(executor := make_executor(tmp_path))
    driver = Driver(watched)  # type: ignore[arg-type]
    for prompt in random_prompts((6, 6, 6, 6, 6), 320):
        driver.add(prompt)
    driver.run()
    errors = []
    for generation in driver.sequences:
        with torch.inference_mode():
            expected = saved.model(torch.tensor([generation.prompt])).logits[0, -1]
        errors.append(((watched.logits[generation.seq_id][0] - expected).abs().max() / expected.std()).item())
    executor.close()
    assert median(errors) <= TOLERANCE
    assert max(errors) <= ROUNDED
    (whole,) = run_ranks(1, lambda share: serve_steps(load(tmp_path, share, UNROUNDED), share.shard))
    for size in (2, 4):
        ranks = run_ranks(size, lambda share: serve_steps(load(tmp_path, share, UNROUNDED), share.shard))
        check_equal(whole, ranks, TOLERANCE)


def test_the_text_model_of_mistral_small_4_is_computed_as_in_transformers(tmp_path: Path) -> None:
    import transformers

    from tests.worker.conftest import COMMON, as_released

    torch.manual_seed(0)
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "head_dim": 16,
    }  # fmt: skip
    text = {**COMMON, **MODELS["mistral4"][1], "model_type": "mistral4"}
    config = transformers.Mistral3Config(text_config=text, vision_config={**vision, "model_type": "pixtral"})
    model = as_released(transformers.Mistral3ForConditionalGeneration(config).eval())
    model.save_pretrained(tmp_path)
    saved, (prompt,) = SavedModel(tmp_path, model), random_prompts((40,), 320)
    driver = Driver(make_executor(tmp_path), budget=23)
    driver.add(prompt)
    (output,) = driver.run()
    assert output == saved.greedy(prompt, output)
    with pytest.raises(UnservedModel, match="Mistral3ForConditionalGeneration with a text model of type mistral"):
        resolve_spec(Path(), {"architectures": ["Mistral3ForConditionalGeneration"],
                              "text_config": {"model_type": "mistral"}})  # fmt: skip
