"""The command line is generated from the configuration, and back."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace

import pytest

from pd_cluster.config import ModelConfig, NodeConfig, ServerConfig
from pd_cluster.errors import StartupError
from pd_cluster.launch.flags import add_config_flags, config_from, given_flags
from pd_cluster.launch.node_process import complete
from pd_http.settings import flag_of

NUMBERS: dict[type, object] = {int: 4096, float: 4096.0, str: "4096"}
FORMS: dict[str, object] = {  # settings that are not any text
    "kv_ports": "4096-4097",
    "lora": ("a=/a", "b=/b"),
    "max_drafts": 9,
    "logits_stages": ("a:B", "c:D"),
    "served_model_name": ("a", "b"),
    "allowed_origins": ("https://a", "https://b"),
}


def parse(*arguments: str, skip: frozenset[str] = frozenset()) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_flags(parser, skip)
    return parser.parse_args(arguments)


def test_every_setting_has_a_flag_with_its_default() -> None:
    assert config_from(parse(), {}) == NodeConfig()
    names = [item.name for kind in NodeConfig.sections().values() for item in fields(kind)]
    assert len(names) == len(set(names)), "flags share one namespace, so field names must differ between sections"


def test_every_setting_can_be_given_and_forwarded() -> None:
    arguments: list[str] = []
    expected: dict[str, object] = {}
    for kind in NodeConfig.sections().values():
        for item in fields(kind):
            value: object = item.default
            if isinstance(value, bool):
                arguments.append(f"--no-{flag_of(item)}" if value else f"--{flag_of(item)}")
                expected[item.name] = not value
            else:
                new = FORMS.get(item.name, NUMBERS.get(type(value)))
                if "choices" in item.metadata:
                    new = item.metadata["choices"][-1]
                parts = new if isinstance(new, tuple) else (new,)
                arguments += [f"--{flag_of(item)}={part}" for part in parts]
                expected[item.name] = new
    namespace = parse(*arguments)
    config = config_from(namespace, {})
    found = {item.name: getattr(getattr(config, section), item.name)
             for section, kind in NodeConfig.sections().items() for item in fields(kind)}  # fmt: skip
    assert found == expected
    assert config_from(parse(*given_flags(namespace)), {}) == config


def test_rarely_needed_flags_are_taken_and_not_shown() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_flags(parser)
    assert parser.parse_args(["--max-readers=7"]).max_readers == 7
    shown = parser.format_help()
    hidden = [item for kind in NodeConfig.sections().values() for item in fields(kind) if "hidden" in item.metadata]
    assert hidden
    assert not [flag_of(item) for item in hidden if flag_of(item) in shown]
    assert "--block-size" in shown


@pytest.mark.parametrize("ports", ["45000", "a-b", "5-4", "0-9", "1-65536", "-", "1-2-3", "+1-5", "45000:45099"])
def test_ports_for_kv_are_a_range(ports: str) -> None:
    with pytest.raises(StartupError, match="LOW-HIGH"):
        config_from(parse(f"--kv-ports={ports}"), {})


def test_only_given_flags_are_forwarded() -> None:
    namespace = parse("--block-size=32", "--no-prefix-caching", "--port=1")
    assert given_flags(namespace, skip=("port",)) == ["--block-size=32", "--no-prefix-caching"]


def test_environment_counts_when_the_flag_is_absent() -> None:
    environ = {"PD_ADVERTISE_HOST": "10.0.0.7"}
    assert config_from(parse(), environ).handoff.advertise_host == "10.0.0.7"
    assert config_from(parse("--advertise-host=h"), environ).handoff.advertise_host == "h"


def test_contradicting_values_are_refused() -> None:
    with pytest.raises(StartupError, match="max_num_batched_tokens"):
        config_from(parse("--max-num-batched-tokens=8", "--max-num-seqs=9"), {})


def test_skipped_fields_have_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--role=prefill", skip=frozenset({"role"}))
    assert stop.value.code == 2
    assert "unrecognized arguments: --role=prefill" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("server", "model", "flag"),
    [
        (ServerConfig(node_id="n" * 257), ModelConfig(), "--node-id"),
        (ServerConfig(node_id="n\u00fc"), ModelConfig(), "--node-id"),
        (ServerConfig(host="h" * 250), ModelConfig(), "--node-id"),
        (ServerConfig(), ModelConfig(served_model_name=("a", "m" * 257)), "--served-model-name"),
    ],
)
def test_names_that_routers_would_not_take_are_refused_at_the_start(
    server: ServerConfig, model: ModelConfig, flag: str
) -> None:
    with pytest.raises(StartupError, match=f"{flag}: .*256"):
        complete(NodeConfig(server=server, model=model), 8100)
    longest = replace(server, node_id="n" * 256)
    assert complete(NodeConfig(server=longest), 8100).server.node_id == longest.node_id
