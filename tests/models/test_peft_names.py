"""PEFT's rules for names of modules. The cases are those of its documentation, and where its two ways differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.adapters import peft_names
from pd_cluster.adapters.peft_config import read_config
from pd_cluster.adapters.peft_names import PeftNames
from pd_cluster.errors import BadAdapter
from tests.models.adapter_files import CONFIG, UNSLOTH

FILE = Path("adapter_config.json")
Q0, Q1, Q11 = (f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1, 11))
DOWN = "model.layers.1.mlp.down_proj"


def names(**changes: Any) -> PeftNames:
    return PeftNames(read_config(json.dumps(CONFIG | changes).encode(), FILE), FILE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target_modules": ["q_proj"]}, {Q0, Q1, Q11}),
        ({"target_modules": ["proj"]}, set()),  # an end is a whole part
        ({"target_modules": ["self_attn.q_proj", DOWN]}, {Q0, Q1, Q11, DOWN}),
        ({"target_modules": ["layers.1.self_attn.q_proj"]}, {Q1}),
        ({"target_modules": ["q_pro."]}, set()),  # names of a list are no patterns
        ({"target_modules": ".*q_proj"}, {Q0, Q1, Q11}),
        ({"target_modules": "q_proj"}, set()),  # a regex is for the whole name
        ({"target_modules": ".*q_pro"}, set()),
        ({"target_modules": r"x|.*\.1\..*"}, {Q1, DOWN}),
        ({"target_modules": "(?i).*Q_PROJ"}, {Q0, Q1, Q11}),
        ({"target_modules": UNSLOTH["target_modules"]}, {Q0, Q1, Q11, DOWN}),
        ({"target_modules": "all-linear"}, {Q0, Q1, Q11, DOWN}),
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, {DOWN}),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"}, {Q0, Q11}),
        ({"target_modules": ["q_proj"], "exclude_modules": [Q0, "x"]}, {Q1, Q11}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, {Q1}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0}, {Q0}),
        ({"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1, 11]}, {Q1, Q11, DOWN}),
        ({"target_modules": ["q_proj"], "layers_to_transform": []}, {Q0, Q1, Q11}),
        ({"target_modules": [Q0, "q_proj"], "layers_to_transform": [1]}, {Q0, Q1}),  # a whole name is always meant
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, {Q1}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "h"}, set()),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "lay(er)s"]}, {Q1}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ""}, {Q1}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "model.layers"}, {Q1}),
        ({"target_modules": r"(?x) .*q_proj  # all"}, {Q0, Q1, Q11}),
        ({"target_modules": r".{1,100}\.\d{1,100}\.self.{6}q.{5}"}, {Q0, Q1, Q11}),
    ],
)
def test_targets(changes: dict[str, Any], named: set[str]) -> None:
    rules = names(**changes)
    assert {name for name in (Q0, Q1, Q11, DOWN) if rules.is_target(name)} == named


@pytest.mark.parametrize(
    ("pattern", "ranks"),
    [
        ({}, (4, 4, 4)),
        ({"q_proj": 8}, (8, 8, 4)),
        ({"down_proj": 8, "q_proj": 2}, (2, 2, 8)),
        ({"self_attn.q.proj": 8, "q_pro.": 2}, (8, 8, 4)),  # a dot is any character
        ({"roj": 8}, (4, 4, 4)),  # from a dot on
        ({r".*proj": 8}, (8, 8, 8)),
        ({"layers.1.self_attn.q_proj": 8}, (4, 8, 4)),
        ({r"layers\.0\..*": 8, "q_proj": 2}, (8, 2, 4)),  # the first one counts
        ({"q_proj": 2, r"layers\.0\..*": 8}, (2, 2, 4)),
        ({"^model.layers.1.mlp.down_proj": 8}, (4, 4, 8)),
        ({"^layers.1.mlp.down_proj": 8}, (4, 4, 4)),
        ({"q_proj|down_proj": 8}, (8, 8, 8)),
        ({"mlp": 8}, (4, 4, 4)),  # up to the end
    ],
)
def test_ranks_by_pattern(pattern: dict[str, int], ranks: tuple[int, ...]) -> None:
    rules = names(rank_pattern=pattern)
    assert tuple(map(rules.rank, (Q0, Q1, DOWN))) == ranks


@pytest.mark.parametrize(("pattern", "layer"), [(["b", "a"], 2), (["a", "b"], 1)])
def test_the_first_list_of_layers_that_matches_counts(pattern: list[str], layer: int) -> None:
    rules = names(target_modules=["q"], layers_to_transform=layer, layers_pattern=pattern)
    assert rules.is_target("model.a.1.b.2.q")
    assert not rules.is_target("model.a.3.b.3.q")


def test_ranks_and_alphas_have_patterns_of_their_own() -> None:
    rules = names(rank_pattern={"q_proj": 16}, alpha_pattern={"layers.0.self_attn.q_proj": 64, "down_proj": 4})
    assert [rules.scale(name) for name in (Q0, Q1, DOWN)] == [64 / 16, 8 / 16, 4 / 4]
    rooted = names(rank_pattern={"q_proj": 16}, alpha_pattern={"q_proj": 32}, use_rslora=True)
    assert [rooted.scale(name) for name in (Q0, DOWN)] == [32 / 4, 8 / 2]


SLOW = "(?:a|aa)+"  # the number of ways to match a run of n is that of Fibonacci


@pytest.mark.parametrize("changes", [{"target_modules": SLOW}, {"exclude_modules": SLOW}, {"rank_pattern": {SLOW: 8}}])
def test_patterns_that_take_for_ever_end(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All patterns together have the deadline, so many slow ones do not add up."""
    config = read_config(json.dumps(CONFIG | changes).encode(), FILE)
    monkeypatch.setattr(peft_names, "MATCH_DEADLINE_S", 0.05)
    rules = PeftNames(config, FILE)
    look = rules.rank if "rank_pattern" in changes else rules.is_target
    for name in ("a" * 80 + "!", Q0):
        with pytest.raises(BadAdapter, match="take too long"):
            look(name)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "("}, {"target_modules": "(?P<"}, {"exclude_modules": "*"},
        {"target_modules": "a{4000000000}"},  # 8 GB to compile
        {"target_modules": "(((a{99}){99}){99}){99}"},  # more than 3 GB
        {"target_modules": "(" + "a." * 600 + "){100}"},
        {"target_modules": "(?:a{99}){101,}"}, {"target_modules": "(?R)?a(?R)?"},
        {"target_modules": "(?:model.layers.99.self_attn.k_proj){e<=30}"},  # `regex` matches with errors
        {"rank_pattern": {"(?i)q_proj": 8}},  # PEFT puts more before it
    ],
)  # fmt: skip
def test_what_is_no_regex_is_named(changes: dict[str, Any]) -> None:
    rules = names(**changes)
    with pytest.raises(BadAdapter, match="is not a regular expression"):
        (rules.rank if "rank_pattern" in changes else rules.is_target)(Q0)
