"""P and D with a drafter: through processes, the answers are those of nodes without one, in fewer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.integration import system as systems
from tests.integration.system import STEPS, Path, System, running_system
from tests.integration.test_sampling_parity import COMPLETIONS, STORY, check_handed_over
from tests.integration.test_structured_answers import FORMAT
from tests.patient_node import PATIENT
from tests.shallow_model import as_demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("llguidance")

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True, "logprobs": 2},
    {"seed": 1, "temperature": 0.6, "n": 2},
    {"seed": 2, "temperature": 1.0} | FORMAT,
    {"temperature": 0, "guided_regex": "(ab){20}"},
    {"seed": 3, "temperature": 1.0, "frequency_penalty": 0.5, "bad_words": ["the"]},
]
REPEATED = 3  # its answer says what was there before
BODIES = [{"prompt": STORY, "max_tokens": 80} | more for more in SETTINGS]


@pytest.fixture(scope="module")
def drafting() -> Iterator[System]:
    hook = {"PD_TEST_ENGINE_HOOK": "tests.drafters:look_up"}
    with mock.patch.object(systems, "PATIENT", PATIENT | hook), running_system(*as_demo_model()) as system:
        yield system


@pytest.mark.parametrize("path", [Path.P_FIRST, Path.D_FIRST])
def test_answers_are_those_without_drafts(path: Path, drafting: System, shared_system: System) -> None:
    for index, body in enumerate(BODIES):
        asked = body | {"cache_salt": f"{path} {index}", "stream": path is Path.P_FIRST}
        if asked["stream"]:
            asked["stream_options"] = {"include_usage": True}
        steps, answers = [], []
        for system in (drafting, shared_system):
            before = system.settled_metric("decode", STEPS)
            answers.append(system.ask(path, COMPLETIONS, asked))
            steps.append(system.settled_metric("decode", STEPS) - before)
        check_handed_over(*answers)
        if index == REPEATED:
            assert steps[0] < 0.8 * steps[1]
