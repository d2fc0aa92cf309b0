"""Models that keep states beside transformers: logits, checkpoints, and what a step leaves alone."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.errors import StartupError
from pd_cluster.models.qwen3_next import Qwen3Next
from pd_cluster.models.registry import build_model, resolve_spec
from pd_cluster.models.weights import fill_at_random
from pd_kernels.backends import TORCH
from pd_kernels.state import PIECE, StateCache
from tests.models.paged_steps import serve_steps
from tests.models.rank_weights import UNROUNDED
from tests.models.state_models import STATE_MODELS, load
from tests.models.state_steps import Chunk, StateSteps
from tests.models.test_cut_models import check_equal
from tests.models.thread_ranks import run_ranks
from tests.worker.conftest import COMMON, SavedModel, save_model
from tests.worker.driver import random_prompts
from tests.worker.quantized_models import BLOCKS, QuantizedCase, compressed, save_quantized
from tests.worker.test_few_rows import FEW_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.models.model_share import ModelShare
    from tests.models.paged_steps import ServedSteps

TOLERANCE = 1e-4  # of the logits' deviation: transformers multiplies pieces of 64 tokens
ROUNDED = 0.3  # where a row is rounded to float8 apart
TABLES = [list(range(16 * row, 16 * row + 16)) for row in range(4)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SavedModel]:
    made: dict[str, SavedModel] = {}

    def get(name: str) -> SavedModel:
        if name not in made:
            made[name] = save_model(STATE_MODELS[name][0], tmp_path_factory.mktemp("state"), STATE_MODELS[name][1])
        return made[name]

    return get


def check(found: torch.Tensor, model: SavedModel, ids: list[int], first: int = 0) -> None:
    """Logits of the tokens of `ids` from `first` on."""
    with torch.inference_mode():
        expected = model.model(torch.tensor([ids])).logits[0, first:]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * expected.std().item())


@pytest.mark.parametrize("name", STATE_MODELS)
def test_whole_prompts_are_computed_as_in_transformers(saved: Callable[[str], SavedModel], name: str) -> None:
    """Shorter than a block, than a piece, of whole pieces, and longer; the last layer keeps a state, too."""
    model, prompts = saved(name), random_prompts((5, 40, 64, 75), 320)
    steps = StateSteps(load(model.directory))
    logits = steps.step(*(Chunk(ids, 0, TABLES[row], row) for row, ids in enumerate(prompts)))
    for found, ids in zip(torch.split(logits, [len(ids) for ids in prompts]), prompts, strict=True):
        check(found, model, ids)
    assert steps.states[len(prompts) :].isnan().all()


@pytest.mark.parametrize("name", STATE_MODELS)
def test_chunks_beside_decodes_are_computed_as_in_transformers(saved: Callable[[str], SavedModel], name: str) -> None:
    model, (long, short) = saved(name), random_prompts((90, 12), 320)
    steps, parts, start = StateSteps(load(model.directory)), [], 0
    decoded = [steps.step(Chunk(short[:5], 0, TABLES[1], 3), rows=[])]
    for number, count in enumerate((7, 33, 1, 30, 19)):
        chunk = Chunk(long[start : start + count], start, TABLES[0], 5)
        decode = Chunk(short[5 + number : 6 + number], 5 + number, TABLES[1], 3)
        logits = steps.step(decode, chunk)
        decoded.append(logits[:1])
        parts.append(logits[1:])
        start += count
    check(torch.cat(decoded), model, short[:10], first=5)
    check(torch.cat(parts), model, long)
    assert torch.equal(steps.step(Chunk(short[10:11], 10, TABLES[1], 3), rows=[0]).isnan().any(), torch.tensor(False))


def test_a_checkpoint_continues_where_it_was_saved_and_nowhere_else(saved: Callable[[str], SavedModel]) -> None:
    """Tokens alone do not show a wrong checkpoint: 11 of 12 were equal 16 tokens too late."""
    model, (first, other) = saved("qwen3-next"), random_prompts((150, 20), 320)
    steps = StateSteps(load(model.directory))
    steps.step(Chunk(first[:70], 0, TABLES[0], 0, saves={0: 6}), rows=[])
    steps.step(Chunk(first[70:144], 70, TABLES[0], 0, saves={1: 4}), rows=[])
    kept = steps.states.clone()
    for slot, length in ((6, PIECE), (4, 2 * PIECE)):
        ids = first[:length] + other
        table = TABLES[0][: length // 16] + TABLES[1][length // 16 :]
        check(steps.step(Chunk(other, length, table, 1, source=slot)), model, ids, first=length)
        assert torch.equal(steps.states[[0, 4, 6]], kept[[0, 4, 6]])
    late = steps.step(Chunk(other, 2 * PIECE, TABLES[1], 1, source=0))
    with pytest.raises(AssertionError, match="not close"):
        check(late, model, first[: 2 * PIECE] + other, first=2 * PIECE)


def test_two_runs_of_a_prompt_give_equal_bits_in_any_slot(saved: Callable[[str], SavedModel]) -> None:
    model, (ids, beside) = load(saved("qwen3.5").directory), random_prompts((100, 21), 320)
    runs = [StateSteps(model), StateSteps(model)]
    for number, steps in enumerate(runs):
        steps.step(Chunk(beside, 0, TABLES[number], 3 + number), Chunk(ids[:64], 0, TABLES[2], number), rows=[])
        steps.step(Chunk(ids[64:], 64, TABLES[2], number), rows=[])
    first, second = (steps.states[slots].view(torch.int32) for steps, slots in zip(runs, ([0, 3], [1, 4]), strict=True))
    assert torch.equal(first, second)
    assert not any(part[[0, 3]].isnan().any() for layer in (0, 1, 2, 4) for part in runs[0].caches[layer])


@pytest.mark.parametrize("name", STATE_MODELS)
def test_two_ranks_have_the_logits_the_keys_and_the_states_of_one(
    saved: Callable[[str], SavedModel], name: str
) -> None:
    """A block of states is those of both ranks one after the other, so nodes of unequal degree read runs of bytes."""
    directory = saved(name).directory
    (whole,) = run_ranks(1, lambda share: serve_steps(load(directory, share), share.shard))
    check_equal(whole, run_ranks(2, lambda share: serve_steps(load(directory, share), share.shard)), TOLERANCE)


def test_ranks_cannot_share_one_key_head(saved: Callable[[str], SavedModel]) -> None:
    with pytest.raises(StartupError, match=r"--tp 4: 2 key heads of delta rules cannot be split evenly over 4 ranks"):
        run_ranks(4, lambda share: load(saved("qwen3-next").directory, share))


def test_plain_experts_may_be_stored_as_one_tensor_of_a_layer(
    saved: Callable[[str], SavedModel], tmp_path: Path
) -> None:
    """As in Qwen3.5's own checkpoints; transformers saves them one by one."""
    directory = saved("qwen3.5-experts").directory
    tensors = load_file(directory / "model.safetensors")
    single = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}
    for layer in range(5):
        block = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([single[f"{block}.{expert}.{part}_proj.weight"] for expert in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{block}.gate_up_proj": torch.cat((gates, ups), 1), f"{block}.down_proj": downs}
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    chunk = Chunk(random_prompts((20,), 320)[0], 0, TABLES[0], 0)
    logits = [StateSteps(load(place)).step(chunk) for place in (directory, tmp_path)]
    assert torch.equal(*logits)
    ranks = run_ranks(2, lambda share: serve_steps(load(tmp_path, share), share.shard))
    (whole,) = run_ranks(1, lambda share: serve_steps(load(directory, share), share.shard))
    check_equal(whole, ranks, TOLERANCE)
    save_file(tensors | dict(list(single.items())[:1]), tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"stored twice: model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-experts"])
def test_the_text_model_of_a_wrapper_is_computed_as_in_transformers(tmp_path: Path, name: str) -> None:
    """Its tensors of images and of drafts are left unread."""
    import transformers

    kind, options = STATE_MODELS[name]
    torch.manual_seed(0)
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48,
        "num_position_embeddings": 16,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(text_config={**COMMON, **options}, vision_config=vision)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {key.split(".")[1] for key in tensors if key.startswith("model.")} == {"language_model", "visual"}
    drafts = {key: torch.ones(2) for key in ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight")}
    save_file(tensors | drafts, tmp_path / "model.safetensors")
    (ids,) = random_prompts((40,), 320)
    check(StateSteps(load(tmp_path)).step(Chunk(ids, 0, TABLES[0], 0)), SavedModel(tmp_path, model), ids)


def test_in_bfloat16_states_stay_float32(saved: Callable[[str], SavedModel]) -> None:
    """The convolution's inputs have the model's dtype, in half the room."""
    model, (ids,) = saved("qwen3.5"), random_prompts((75,), 320)
    short = load(model.directory, dtype=torch.bfloat16)
    steps = StateSteps(short)
    found = torch.cat((steps.step(Chunk(ids[:70], 0, TABLES[0], 1)), steps.step(Chunk(ids[70:], 70, TABLES[0], 1))))
    with torch.inference_mode():
        expected = model.model(torch.tensor([ids])).logits[0]
    assert (found - expected).abs().mean() < 0.05 * expected.std()
    assert {cache.recurrent.dtype for cache in steps.caches.values() if isinstance(cache, StateCache)} == {
        torch.float32
    }
    wide, narrow = (short.spec.kv_groups(16, dtype)[-1].block_bytes for dtype in ("float32", "bfloat16"))
    assert wide - narrow == 6 * 2 * (2 * 16 + 3 * 24) * 3 * 2, "each of 6 heads has 2 of 4 layers"


_WIDE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 128, "num_attention_heads": 2,
    "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "initializer_range": 0.05,
}  # fmt: skip
_WIDE_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256,
}  # fmt: skip
_GATES = r"lm_head|.*mlp\.gate$|.*shared_expert_gate$|.*in_proj_(ba|a|b)$"


def _excluded(*names: str) -> list[str]:
    """As published: the modules of each layer by the names in a wrapper, if there is one."""
    return [
        "lm_head",
        "model.visual.merger.linear_fc1",
        *(name.replace("N", str(at)) for at in (0, 1) for name in names),
    ]


FLOAT8 = {
    "qwen3-next": QuantizedCase(
        "Qwen3Next",
        {**BLOCKS, "modules_to_not_convert": _excluded("model.layers.N.linear_attn.in_proj_ba",
                                                       "model.layers.N.mlp.gate")},
        _GATES,
        {**_WIDE, **_WIDE_EXPERTS},
    ),
    "qwen3.5": QuantizedCase(
        "Qwen3_5",
        {**BLOCKS, "modules_to_not_convert": _excluded("model.language_model.layers.N.linear_attn.in_proj_a",
                                                       "model.language_model.layers.N.linear_attn.in_proj_b")},
        _GATES,
        _WIDE,
    ),
    "qwen3.5-experts": QuantizedCase(
        "Qwen3_5Moe",
        compressed("block", ignore=("lm_head", r"re:.*\.mlp\.gate$", r"re:model\.language_model\..*\.in_proj_[ab]$")),
        _GATES,
        {**_WIDE, **_WIDE_EXPERTS, "moe_intermediate_size": 256},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOAT8)
def test_weights_in_float8_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Of short prompts, most of which have no sum that is rounded apart."""
    saved, prompts = save_quantized(FLOAT8[name], tmp_path), random_prompts((6, 6, 6, 6, 6), 320)
    steps, errors = StateSteps(load(tmp_path)), []
    logits = steps.step(*(Chunk(ids, 0, [row], row) for row, ids in enumerate(prompts)))
    for found, ids in zip(torch.split(logits, 6), prompts, strict=True):
        with torch.inference_mode():
            expected = saved.model(torch.tensor([ids])).logits[0]
        errors.append(((found - expected).abs().max() / expected.std()).item())
    assert median(errors) <= TOLERANCE
    assert max(errors) <= ROUNDED
    (whole,) = run_ranks(1, lambda share: serve_steps(load(tmp_path, share, UNROUNDED), share.shard))
    ranks = run_ranks(2, lambda share: serve_steps(load(tmp_path, share, UNROUNDED), share.shard))
    check_equal(whole, ranks, TOLERANCE)


@pytest.mark.parametrize("is_quantized", [True, False], ids=["float8", "plain"])
def test_few_rows_have_a_product_for_betas_and_decays_beside_float8(is_quantized: bool) -> None:
    config = {
        **_WIDE, "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 320, "intermediate_size": 128,
        **_WIDE_EXPERTS, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "quantization_config": FLOAT8["qwen3-next"].settings if is_quantized else None,
    }  # fmt: skip
    spec, found = resolve_spec(Path(), config), []
    for kernels in (TORCH, FEW_ROWS):
        model = build_model(spec, kernels, 64, torch.float32, torch.device("cpu"))
        fill_at_random(model, seed=3)
        model.finish_loading()
        steps = StateSteps(model)
        steps.step(Chunk([5, 6, 7], 0, TABLES[0], 1), rows=[])
        found.append(steps.step(Chunk([8], 3, TABLES[0], 1)))
        assert isinstance(model, Qwen3Next)
        few = {kind for kind, linears in model._linears.items() if linears[0].max_few_rows}
        alone = {"betas_decays"} if is_quantized else set(model._linears)
        assert few == (alone if kernels is FEW_ROWS else set())
    torch.testing.assert_close(*found, rtol=0, atol=TOLERANCE * float(found[0].std()))


@pytest.mark.parametrize("part", ["", ".down_proj", ".gate_proj"])
def test_a_shared_expert_that_is_not_quantized_as_the_others_stays_apart(part: str) -> None:
    plain = [f"model.layers.{layer}.mlp.shared_expert{part}" for layer in (0, 1)] if part else []
    if part == ".gate_proj":
        plain += [name.replace("gate", "up") for name in plain]
    settings = FLOAT8["qwen3-next"].settings
    config = {
        **_WIDE, **_WIDE_EXPERTS, "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 320,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "shared_expert_intermediate_size": 128,
        "quantization_config": {**settings, "modules_to_not_convert": [*settings["modules_to_not_convert"], *plain]},
    }  # fmt: skip
    model = build_model(resolve_spec(Path(), config), TORCH, 64, torch.float32, torch.device("cpu"))
    assert isinstance(model, Qwen3Next)
    assert ("shared_down" in model._linears) == bool(part)
    fill_at_random(model, seed=3)
    model.finish_loading()
    assert StateSteps(model).step(Chunk([5, 6, 7], 0, TABLES[0], 1)).isfinite().all()


@pytest.mark.parametrize("settings", [None, FLOAT8["qwen3-next"].settings], ids=["plain", "float8"])
def test_dummy_weights_are_the_same_whole_model_at_any_degree(settings: dict[str, Any] | None) -> None:
    config = {
        **_WIDE, **_WIDE_EXPERTS, "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 320,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "quantization_config": settings,
    }  # fmt: skip
    spec = resolve_spec(Path(), config)

    def of_rank(share: ModelShare) -> ServedSteps:
        model = build_model(spec, UNROUNDED, 64, torch.float32, torch.device("cpu"), share)
        fill_at_random(model, seed=3)
        model.finish_loading()
        return serve_steps(model, share.shard)

    check_equal(run_ranks(1, of_rank)[0], run_ranks(2, of_rank), TOLERANCE)
