"""Models that transformers' modules compute over the paged cache: their tokens, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.config import NodeConfig, SchedulerConfig
from pd_cluster.errors import StartupError, UnservedModel
from pd_cluster.launch.check import check_capacity
from pd_cluster.models.fingerprint import fingerprint
from pd_cluster.models.quantization import MODELOPT_FILE
from pd_cluster.models.registry import choose_implementation
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.worker.cuda_graphs.set_up import capturable
from pd_kernels.backends import TORCH
from tests.worker.driver import Driver, make_executor, random_prompts
from tests.worker.reads import check_read, read_prompt
from tests.worker.watched_executor import WatchedExecutor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd_cluster.models.spec import ModelSpec

VOCAB_SIZE, WINDOW, NUM_TOKENS = 320, 24, 12
LENGTHS = (5, 16, 24, 25, 70)  # around the block and the window
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
COMMON = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, **HEADS,
    "max_position_embeddings": 512, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 128,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW,
                            "rope_parameters": {**YARN, "truncate": False}}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0,
                          "final_logit_softcapping": 3.0}),
    "deepseek_v3": ("deepseek_v3", {**ROUTED, **LATENT, "n_group": 4, "topk_group": 2,
                                    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}),
    "llama": ("llama", {}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {**ROUTED, "use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1}),
    "gemma3_text": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": WINDOW, "query_pre_attn_scalar": 20}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "ministral3": ("ministral3", {}),
    "phi3": ("phi3", {}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.0,
                            "residual_multiplier": 0.7}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW}),
    "smollm3": ("smollm3", {}),
    "seed_oss": ("seed_oss", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {**ROUTED, **LATENT, "n_group": 1, "topk_group": 1}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 2}),
}  # fmt: skip
QUICK = ("gpt_oss", "gemma2", "deepseek_v3", "gpt2")  # sinks; soft caps; padded values; names of its own


def save_family(name: str, directory: Path) -> Any:
    """A random model of a family. Its weights are large enough that attention and experts count."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind, options = FAMILIES[name]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**COMMON, **options}), attn_implementation="eager")
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.1)
            elif "norm" in key or "ln_" in key:
                weight.add_(torch.rand_like(weight), alpha=0.3)
            else:  # biases, sinks
                weight.normal_(0.0, 0.3)
    model.eval().save_pretrained(directory)
    return model


@pytest.mark.long
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_tokens_and_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Chunks of at most 23 tokens beside decodes, blocks in random order."""
    model = save_family(name, tmp_path)
    watched = WatchedExecutor(make_executor(tmp_path, model_impl="transformers"))
    driver = Driver(watched, budget=23)  # type: ignore[arg-type]
    for prompt in random_prompts(LENGTHS, VOCAB_SIZE):
        driver.add(prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0))
    driver.run()
    for generation in driver.sequences:
        with torch.inference_mode():
            logits = model(torch.tensor([generation.all_ids]), use_cache=False).logits[0]
        expected = logits[len(generation.prompt) - 1 : -1]
        found = torch.stack(watched.logits[generation.seq_id])
        assert (found - expected).abs().max() < 3e-5 * expected.std()
        assert generation.all_ids[len(generation.prompt) :] == expected.argmax(-1).tolist()


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt_oss", "gpt2"])
def test_a_prompt_computed_on_one_node_goes_on_at_another(tmp_path: Path, name: str) -> None:
    model = save_family(name, tmp_path)
    [prompt] = random_prompts([70], VOCAB_SIZE)
    prefill, decode = (make_executor(tmp_path, model_impl="transformers") for _ in range(2))
    assert prefill.model.fingerprint == decode.model.fingerprint
    before, after = Driver(prefill, budget=23), Driver(decode)
    first = before.add(prompt, SamplingParams(max_tokens=1, temperature=0.0))
    before.run()
    for source, target in zip(prefill._cache.tensors, decode._cache.tensors, strict=True):
        target.copy_(source)
    rest = after.add(prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0))
    rest.computed, rest.tables, rest.tokens = first.computed, first.tables, list(first.tokens)
    after.pools.adopt(rest.tables)
    after.run()
    with torch.inference_mode():
        logits = model(torch.tensor([rest.all_ids]), use_cache=False).logits[0]
    assert rest.all_ids[70:] == logits[69:-1].argmax(-1).tolist()


# Windows that the modules have in their masks only
MASKED = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **COMMON}


def choose(wanted: str, changes: Mapping[str, Any]) -> tuple[ModelSpec, str]:
    return choose_implementation(Path("model"), {**LLAMA, **changes}, wanted)


@pytest.mark.long_cases
@pytest.mark.parametrize("name", [*QUICK, "granite", "cohere2"])
def test_prompts_are_read(tmp_path: Path, name: str) -> None:
    """After the body some families scale or cap the logits."""
    model = save_family(name, tmp_path)
    executor = make_executor(tmp_path, model_impl="transformers")
    (prompt,) = random_prompts([40], VOCAB_SIZE)
    with torch.inference_mode():
        found = model(torch.tensor([prompt]), output_hidden_states=True)
    check_read(*read_prompt(executor, prompt), prompt, found.logits[0], found.hidden_states[-1][0, -1])
    executor.close()


def test_a_family_of_ours_is_used_where_it_serves_the_config() -> None:
    for wanted in ("auto", "native"):
        spec, line = choose(wanted, {})
        assert (spec.modules, line) == (None, "")
    assert choose("transformers", {})[1] == (
        "LlamaForCausalLM by transformers' modules: right, not fast (--model-impl transformers)"
    )


@pytest.mark.long
def test_a_setting_that_no_family_serves_is_a_reason_for_transformers() -> None:
    spec, line = choose("auto", {"rope_parameters": LONGROPE})
    assert spec.modules is not None
    assert line.startswith("LlamaForCausalLM by transformers' modules: right, not fast (model/config.json: rope")
    assert line.endswith("cannot be served: RoPE of type longrope)")
    _, other = choose("auto", {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"})
    assert other.endswith("(model/config.json: architecture Olmo2ForCausalLM is not served)")


def test_native_names_what_would_serve_the_model() -> None:
    with pytest.raises(UnservedModel, match=r"RoPE of type longrope; .*; --model-impl transformers would serve it$"):
        choose("native", {"rope_parameters": LONGROPE})
    with pytest.raises(
        UnservedModel, match=r"architecture FooForCausalLM is not served.*; .*model_type foo is unknown"
    ):
        choose("native", {"architectures": ["FooForCausalLM"], "model_type": "foo"})


def test_a_malformed_config_is_refused_not_completed_with_defaults() -> None:
    with pytest.raises(StartupError, match="hidden_size must be a positive integer, not None"):
        choose("auto", {"hidden_size": None})


def test_a_window_that_the_modules_ignore_is_no_reason_to_refuse() -> None:
    """Llama's config may keep the setting of the Mistral from which it was converted."""
    assert choose("transformers", {"sliding_window": WINDOW})[0].windows == (0, 0, 0, 0)


def test_a_padding_token_is_no_reason_to_refuse() -> None:
    """GPT-2 compares the tokens of each step with it."""
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "pad_token_id": 0}
    assert choose("auto", {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes})[0].num_layers == 4


@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("architecture", "changes", "says"),
    [
        ("Llama4ForCausalLM", {"model_type": "llama4_text"}, "attention_chunk_size = 8192: chunked attention is not"),
        ("Qwen3NextForCausalLM", {"model_type": "qwen3_next"}, "layer_types: linear_attention layers are not served"),
        ("MambaForCausalLM", {"model_type": "mamba"}, "MambaForCausalLM has state besides keys and values|layer_types"),
        ("DeepseekV32ForCausalLM", {"model_type": "deepseek_v32"}, "index_topk = 2048: attention that chooses its"),
        ("T5ForConditionalGeneration", {"model_type": "t5"}, "is_encoder_decoder = True: an encoder is not served"),
        ("BertLMHeadModel", {"model_type": "bert"}, "BertSelfAttention asks for attention to later tokens"),
        ("GPTJForCausalLM", {"model_type": "gptj"}, "GPTJForCausalLM cannot use another attention"),
        ("DogeForCausalLM", {"model_type": "doge"}, "DogeAttention asks for a mask of its own"),
        ("DiffLlamaForCausalLM", {"model_type": "diffllama"}, "layer 0 attends twice"),
        ("Gemma4ForCausalLM", {"model_type": "gemma4_text"}, "layers differ in heads, KV heads and head size"),
        ("Mistral3ForConditionalGeneration", {"model_type": "mistral3"}, "wrappers of a text model are not served"),
        ("FooForCausalLM", {"model_type": "foo", "auto_map": {"AutoConfig": "foo.Foo"}}, "code .* never run"),
        ("FooForCausalLM", {}, r"architectures = \['FooForCausalLM'\]: of model_type llama LlamaForCausalLM is served"),
        ("ViTModel", {"model_type": "vit"}, r"architectures = \['ViTModel'\]: of model_type vit no decoder is served"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE of type dynamic"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, "quantized weights are not served"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads = 3: 4 heads cannot share them"),
        ("Qwen2MoeForCausalLM", {**MASKED, "model_type": "qwen2_moe"}, "sliding_window = 24: the .* of layer 0 is not"),
        ("PhimoeForCausalLM", {**MASKED, "model_type": "phimoe"}, "sliding_window = 24: the .* of layer 0 is not told"),
        ("RobertaForCausalLM", {"model_type": "roberta", "is_decoder": True}, "positions that begin after pad_token"),
        ("LlamaForCausalLM", {"num_attention_heads": "four"}, "built from it: .*num_attention_heads. expected int"),
    ],
)  # fmt: skip
def test_what_the_modules_would_compute_wrongly_is_refused(
    architecture: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnservedModel, match=f"^model/config.json: transformers' modules cannot be .*({says})"):
        choose("transformers", {"architectures": [architecture], **changes})


def test_quantization_in_a_file_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / MODELOPT_FILE).write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(UnservedModel, match=f"{MODELOPT_FILE}: quantization: quantized weights are not served"):
        choose_implementation(tmp_path, LLAMA, "transformers")


def test_a_model_must_take_positions_and_the_rows_that_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `forward` has `**kwargs` instead, it would drop both."""
    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", lambda model, input_ids, **others: None)
    with pytest.raises(UnservedModel, match="LlamaForCausalLM takes no logits_to_keep and no position_ids"):
        choose("transformers", {})


def test_longrope_is_served_up_to_its_first_length() -> None:
    """Beyond it, the keys of all tokens of a step would have other frequencies."""
    rope = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}
    spec = choose("auto", {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **rope})[0]
    assert spec.max_len == 128


@pytest.mark.long
def test_the_spec_has_what_the_modules_say() -> None:
    native, modules = choose("native", {})[0], choose("transformers", {})[0]
    same = (
        "architecture", "vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_len", "windows",
        "group_windows", "tied_embeddings", "dtype",
    )  # fmt: skip
    assert [getattr(modules, name) for name in same] == [getattr(native, name) for name in same]
    assert modules.layer_parameters == native.layer_parameters + 9 * 64, "norms count"
    mixed = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9}
    assert choose("auto", {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **mixed})[0].windows == (
        9, 0, 9, 0,
    )  # fmt: skip


@pytest.mark.long
def test_the_fingerprint_covers_the_config() -> None:
    def of(wanted: str = "transformers", **changes: Any) -> str:
        return fingerprint(choose(wanted, changes)[0], "dummy")

    assert of(dtype="bfloat16", transformers_version="5.0", _name_or_path="x") == of()
    modules = choose("transformers", {"rope_parameters": YARN, "dtype": "bfloat16"})[0].modules
    assert modules is not None
    assert json.loads(modules.config) == {**LLAMA, "rope_parameters": YARN}
    assert len({of(), of("native"), of(rms_norm_eps=1e-3), of(rope_theta=5e3)}) == 4


@pytest.mark.long
def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.layers.0.mlp.gate_proj.scale": torch.ones(1)}, file, {"format": "pt"})
    with pytest.raises(StartupError, match=r"unknown: \['model.layers.0.mlp.gate_proj.scale'\]$"):
        make_executor(tmp_path, model_impl="transformers")
    save_file({name: weight for name, weight in weights.items() if "v_proj" not in name}, file, {"format": "pt"})
    with pytest.raises(StartupError, match=r"missing: \['model.layers.0.self_attn.v_proj.weight', "):
        make_executor(tmp_path, model_impl="transformers")


@pytest.mark.long
def test_dummy_weights_follow_from_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_parameters": LONGROPE}))
    outputs = []
    for seed in (1, 1, 2):
        driver = Driver(make_executor(tmp_path, load_format="dummy", seed=seed))
        driver.add(random_prompts([20], VOCAB_SIZE)[0])
        outputs += driver.run()
    assert outputs[0] == outputs[1] != outputs[2]


def test_steps_are_not_captured() -> None:
    lines: list[str] = []
    limits = capturable(SchedulerConfig(), choose("transformers", {})[0], TORCH, lines.append)
    assert (limits.cuda_graphs, limits.depth_on("cuda")) == (False, 1)
    assert lines == ["no captured steps: the modules of LlamaForCausalLM may wait for the host"]


def test_the_check_says_what_computes_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_parameters": LONGROPE}))
    finding = next(check_capacity(NodeConfig(), tmp_path))
    assert finding.what == "model implementation"
    assert finding.detail.startswith("LlamaForCausalLM by transformers' modules: right, not fast (")


@pytest.mark.long
def test_configs_of_our_families_are_read_without_torch() -> None:
    code = (
        "import sys, json, pathlib; from pd_cluster.models.registry import choose_implementation; "
        "choose_implementation(pathlib.Path('model'), json.loads(sys.argv[1]), 'auto'); "
        "print({'torch', 'transformers'} & {*sys.modules})"
    )
    config = json.dumps({**LLAMA, "rope_scaling": YARN})
    found = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_an_fp8_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_parameters": LONGROPE}))
    with pytest.raises(StartupError, match=r"^--kv-cache-dtype fp8 is not served for LlamaForCausalLM by transformers"):
        make_executor(tmp_path, load_format="dummy", kv_cache_dtype="fp8")
