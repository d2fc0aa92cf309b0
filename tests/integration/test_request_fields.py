"""Every field of the tables of docs/api.md through P and D, in both orders, and through one node."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from docs.generate.api import READ
from pd_cluster.server.bodies.fields import HARMLESS, IGNORED_HEADER, REFUSED
from pd_cluster.server.bodies.schema import ChatBody, CompletionBody
from tests.docs.test_api_page import NEEDS, NOT_BY_DEFAULT
from tests.integration.system import Path, System

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

AT_ONCE = 16
BODIES: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": READ["messages"].example, "max_tokens": 1}),
    "/v1/completions": (CompletionBody, {"prompt": "hi", "max_tokens": 1}),
}
# fields of OpenAI's document, of vLLM's and of SGLang's protocols in November 2026
OPENAI = """
    messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
    metadata modalities n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_retention
    reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options temperature
    tool_choice tools top_logprobs top_p user verbosity web_search_options prompt best_of echo suffix
"""
VLLM = """
    thinking_token_budget include_reasoning use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
    add_generation_prompt continue_final_message add_special_tokens documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval prompt_embeds guided_json
    guided_regex guided_choice guided_grammar logits_processors
"""
SGLANG = """
    return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
    return_prompt_token_ids return_meta_info task json_schema regex ebnf stop_regex no_stop_trim lora_path
    session_params separate_reasoning stream_reasoning max_dynamic_patch min_dynamic_patch use_audio_in_video
    images_config custom_logit_processor custom_params input_ids rid extra_key ngram_corpus_id bootstrap_host
    bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank custom_labels
"""


def test_every_field_of_the_documents_is_in_a_table() -> None:
    named = set(f"{OPENAI} {VLLM} {SGLANG}".split())
    assert named - (READ.keys() | REFUSED.keys() | HARMLESS.keys()) == set()


def cases(path: str, is_handoff: bool) -> Iterator[tuple[str, dict[str, Any], int, str | None]]:
    """(field, body, status of the answer, its header of ignored fields).

    Through a handoff each field that is not read goes to one of the two endpoints.
    """
    kind, plain = BODIES[path]
    fields = kind.__struct_fields__  # type: ignore[attr-defined]
    for name in fields:
        example = True if (path, name) == ("/v1/chat/completions", "logprobs") else READ[name].example
        if name != "kv_transfer_params":  # the router's own
            yield name, plain | NEEDS.get(name, {}) | {name: example}, 200, NOT_BY_DEFAULT.get(name)
    share = slice(list(BODIES).index(path), None, 2) if is_handoff else slice(None)
    for name in sorted(REFUSED.keys() - set(fields))[share]:
        yield name, plain | {name: "something"}, 400, None
    for name in sorted(HARMLESS)[share]:
        yield name, plain | {name: 1}, 200, name


@pytest.mark.parametrize("path", Path)
def test_every_field_is_read_refused_by_name_or_named(path: Path, shared_system: System) -> None:
    pytest.importorskip("llguidance")  # for the fields of grammars
    url = shared_system.urls["decode"] if path is Path.MIXED else shared_system.router_url
    headers = {} if path is Path.MIXED else {"x-pd-route": path.value}

    async def ask_all() -> None:
        places = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client, asyncio.TaskGroup() as group:
            model = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]

            async def ask(endpoint: str, name: str, body: dict[str, Any], status: int, ignored: str | None) -> None:
                body |= {"model": model} if name == "model" else {}
                async with places:
                    answer = await client.post(f"{url}{endpoint}", json=body, headers=headers)
                assert answer.status_code == status, (endpoint, name, answer.text)
                assert answer.headers.get(IGNORED_HEADER) == ignored, (endpoint, name)
                if status == 400:
                    assert answer.json()["error"]["param"] == name

            for endpoint in BODIES:
                for case in cases(endpoint, path is not Path.MIXED):
                    group.create_task(ask(endpoint, *case))

    asyncio.run(ask_all())
    shared_system.settle()
