"""What a person at the keyboard meets: help, wrong flags, taken ports."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pd_cluster.launch.cli import main
from pd_cluster.launch.sockets import listen, port_of
from pd_router.admission.api_keys import parse_keys
from tests.cluster import CLI, READY_DEADLINE_S, ROOT, SOURCES

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = (
    ["up"], ["prefill"], ["decode"], ["mixed"], ["router"], ["check"], ["nodes"], ["nodes", "drain"],
    ["bench", "serve"],
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert f"usage: pd-cluster {' '.join(command)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["decode", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (
            ["decode", "--max-tokens-beside-decodes=64"],
            "=64 was removed: a node's --slo-itl-ms bounds what prompts add",
        ),
        (
            ["mixed", "--max-tokens-beside-decodes", "0"],
            "--max-tokens-beside-decodes was removed: a node's --slo-itl-ms",
        ),
        (["decode", "--port", "many"], "argument --port: invalid int value: 'many'"),
        (["decode", "--role", "prefill"], "unrecognized arguments: --role prefill"),
        (["mixed", "--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
        (["up", "--port", "many"], "argument --port: many is not a port: write 0 to 65535"),
        (["up", "--max-model-length", "9"], "--max-model-length 9 (did you mean --max-model-len?)"),
        (["up", "--tls-name", "x"], "unrecognized arguments: --tls-name x\n"),
        (["nodes", "drain", "x", "--wait=3"], "--wait=3 (did you mean --wait-s?)"),
        (["up", "--prefill", "-1"], "argument --prefill: must be 0 to 1000, not -1"),
        (["up", "--decode", "100000000000"], "argument --decode: must be 0 to 1000, not 100000000000"),
        (["ray", "scale", "--router", "1001"], "argument --router: must be 0 to 1000, not 1001"),
        (["bench", "serve", "--goodput", "ttft"], "argument --goodput: 'ttft': write NAME:MILLISECONDS"),
        (["bench", "serve", "--input-len", "9:3"], "argument --input-len: '9:3': write 128, or 100:1024"),
        (["bench", "serve", "--rate", "0"], "argument --rate: must be above 0"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_flags(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 2, "the reason, and where the flags are explained"
    words = [word for word in arguments[:2] if word.isalpha()]
    assert error.startswith(" ".join(["pd-cluster", *words]) + ": error: "), "the command that the mistake is in"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["mixed", "--max-num-seqs=9", "--max-num-batched-tokens=8"],
            "max_num_batched_tokens (8) must be at least max_num_seqs (9)",
        ),
        (["mixed", "--max-num-seqs=-1"], "--max-num-seqs must be at least 0, not -1"),
        (["mixed", "--model=/no/such/model"], "model '/no/such/model' is neither a directory nor a hub id"),
        (["mixed", "--host=203.0.113.1"], "this machine has no address 203.0.113.1"),
        (["up", "--decode=0"], "--decode or --mixed must be at least 1"),
        (["up", "--port=0", "--model=/no/such/model"], "model '/no/such/model' is neither a directory nor a hub id"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("pd-cluster: error: ")
    assert error.count("\n") == 1


WRONG = ["--tp=0", "--kv-cache-gb=-1", "--max-waiting=-2"]  # of three sections


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["mixed", *WRONG], ["--tp must", "--kv-cache-gb must", "--max-waiting must"]),
        (["mixed", *WRONG, "--max-headers=0", "--port=-1"], [
            "--tp must", "--kv-cache-gb must", "--max-waiting must", "--max-headers must", "--port must"
        ]),
        (["up", "--swap-gb=-1", "--block-size=17"], ["--swap-gb must", "--block-size 17 is not"]),
        (["mixed", "--block-size=-5"], ["--block-size must"]),
        (["mixed", "--disk-cache-dir=/kv", "--tp=2", "--device=cpu"], ["--disk-cache-dir needs", "-dir serves"]),
        (
            ["router", "--start-empty", "--workers=0", "--max-headers=0", "--max-held-mb=0"],
            ["--workers must", "--max-headers must", "--max-held-mb must"],
        ),
    ],
)  # fmt: skip
def test_all_wrong_values_are_told(arguments: list[str], told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    for start in told:
        assert sum(start in line for line in lines) == 1, start
    assert len(lines) == len(told)


def test_all_wrong_flags_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["mixed", "--bogus", "3", "4", "--max-tokens-beside-decodes=5", "--tp", "1", "--max-model-length=9"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "pd-cluster mixed: error: unrecognized arguments: --bogus 3 4",
        "--max-tokens-beside-decodes=5 was removed: a node's --slo-itl-ms bounds what prompts add to the gaps of "
        "streams, in ms",
        "unrecognized arguments: --max-model-length=9 (did you mean --max-model-len?)",
        "`pd-cluster mixed --help` explains what it takes",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--blok-size 3 -x 4", ["--blok-size 3 (did you mean --block-size?)", "-x 4"]),
        ("--foo -5 -.5 - --bar", ["--foo -5 -.5 -", "--bar"]),
        ("--foo -- --bar", ["--foo", "--bar"]),
    ],
)
def test_each_wrong_flag_is_told_with_its_values(
    words: str, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["mixed", *words.split()])
    *lines, _ = capsys.readouterr().err.removeprefix("pd-cluster mixed: error: ").splitlines()
    assert lines == [f"unrecognized arguments: {one}" for one in told]


@pytest.mark.parametrize("command", ["mixed", "up", "router"])
def test_a_taken_port(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(listen("127.0.0.1", 0)) as listener:
        extra = ["--decode=http://127.0.0.1:1"] if command == "router" else []
        assert main([command, f"--port={port_of(listener)}", *extra]) == 2
        assert "another --port" in capsys.readouterr().err


def test_a_directory_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mixed", f"--model={tmp_path}"]) == 2
    assert f"{tmp_path} is not a model directory: it has no config.json" in capsys.readouterr().err


@pytest.mark.long
def test_help_and_router_start_without_torch() -> None:
    block = "import sys; sys.modules.update({'torch': None, 'transformers': None}); "
    run = "from pd_cluster.launch.cli import main; sys.exit(main(sys.argv[1:]))"
    for arguments in (["--help"], ["router", "--port=0"]):
        done = subprocess.run(
            [sys.executable, "-c", block + run, *arguments], capture_output=True, text=True,
            timeout=READY_DEADLINE_S, cwd=ROOT, env={"PYTHONPATH": SOURCES, "PATH": ""},
        )  # fmt: skip
        assert "ModuleNotFoundError" not in done.stderr, done.stderr
        assert done.returncode == (0 if arguments == ["--help"] else 2), done.stderr  # a router needs a node


@pytest.mark.long
def test_the_parser_needs_no_module_of_a_command() -> None:
    """They took 1 s of CPU of each command."""
    heavy = ("fastapi", "httpx", "numpy", "pd_router.app", "ray", "starlette", "torch", "uvicorn")
    block = f"import sys; sys.modules.update(dict.fromkeys({heavy})); "
    done = subprocess.run(
        [sys.executable, "-c", f"{block}from pd_cluster.launch.cli import build_parser; build_parser()"],
        capture_output=True, text=True, timeout=READY_DEADLINE_S, cwd=ROOT, env={"PYTHONPATH": SOURCES},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_as_a_program() -> None:
    done = subprocess.run(
        [*CLI, "--version"],
        capture_output=True,
        text=True,
        timeout=READY_DEADLINE_S,
        check=True,
        env={"PYTHONPATH": SOURCES},
    )
    assert done.stdout.startswith("pd-cluster ")


@pytest.mark.long
def test_a_new_key_is_told_once_and_its_line_has_its_hash_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "team-a"]) == 0
    said = capsys.readouterr()
    key = said.err.split()[-1]
    assert key not in said.out
    assert parse_keys(said.out.encode()).find([(b"x-api-key", key.encode())]) is not None
    assert main(["keys", "new", "team a"]) == 2
    assert "name is not valid" in capsys.readouterr().err
