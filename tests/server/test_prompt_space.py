"""One place says what separates the KV of prompts, and everything that a request tells the engine follows it."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from pathlib import Path

import pd_cluster
from pd_cluster.config import NodeConfig
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.params.sampling import TextOptions
from pd_cluster.server.requests.generation_request import GenerationRequest, digest_of
from pd_cluster.server.requests.prompt_space import PromptSpace
from pd_connectors.protocol.cache_space import cache_space

FOLDER = Path(pd_cluster.__file__).parent
FIRST, SECOND = "1" * 32, "2" * 32  # digests of two trainings under one name


def request(space: PromptSpace) -> GenerationRequest:
    return GenerationRequest("engine", "client", [1, 2, 3], SamplingParams(max_tokens=1), TextOptions(), space=space)


def test_no_other_file_reads_the_salt_of_a_body() -> None:
    """Else a prompt of an adapter could be hashed as one of the base."""
    readers = {
        str(path.relative_to(FOLDER))
        for path in FOLDER.rglob("*.py")
        if ".cache_salt" in path.read_text() and "bench" not in path.parts
    }
    assert readers == {"server/requests/prompt_space.py"}


def test_the_engine_gets_the_space_in_place_of_the_salt() -> None:
    spaces = [PromptSpace(salt, adapter) for salt in ("", "tenant") for adapter in ("", FIRST, SECOND)]
    salts = [request(space).to_engine(NodeConfig(), 0.0).salt for space in spaces]
    assert salts == [cache_space(space.adapter, space.salt) for space in spaces]
    assert len(set(salts)) == len(spaces)


def test_a_stream_goes_on_with_its_own_adapter_only() -> None:
    """A node compares this digest before it continues another node's stream."""
    digests = {digest_of([request(PromptSpace("", adapter))]) for adapter in ("", FIRST, SECOND)}
    assert len(digests) == 3
    assert blake2b(array("I", [1, 2, 3]).tobytes(), digest_size=16).digest() in digests, "older releases go on with it"
    assert digest_of([request(PromptSpace("tenant"))]) in digests, "a salt changes no answer"
