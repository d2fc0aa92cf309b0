"""Agents as their users install them: their packages, how they are pointed at a router, and what is run.

Each runs in a home of its own, with its telemetry and its updates off, and talks to loopback alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INSTALL_DEADLINE_S = 600.0
PROMPT = "Say in one word what is in this folder."
KEY = "none"  # the router asks for none
_UNREACHABLE = ("E404", "ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN")


class Invocation(NamedTuple):
    """What to run, beside the environment that all have."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


class RealClient(NamedTuple):
    """`spec`: its file in `clients/`. `prepare`: writes its settings into a home, for a router and a model."""

    spec: str
    package: str
    binary: str
    prepare: Callable[[Path, str, str], Invocation]


def install(client: RealClient, version: str, folder: Path) -> Path:
    """Its program. What is installed there already stays. Skips the test where no registry can be reached."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"{client.package} needs npm")
    place = folder / f"{client.spec}-{version}"
    program = place / "node_modules" / ".bin" / client.binary
    if not program.exists():
        place.mkdir(parents=True, exist_ok=True)
        (place / "package.json").write_text("{}")  # else npm looks for one above
        command = [npm, "install", "--no-fund", "--no-audit", f"{client.package}@{version}"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
        if done.returncode != 0 and any(word in done.stderr for word in _UNREACHABLE):
            pytest.skip(f"no registry has {client.package}@{version}")
        assert done.returncode == 0, done.stderr
    return program


def environment(home: Path, work: Path) -> dict[str, str]:
    """That of the test without its proxies and keys, in this home and this folder."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and "KEY" not in name}
    return kept | {"HOME": str(home), "PWD": str(work), "DO_NOT_TRACK": "1", "CI": "1"}


def _codex(home: Path, url: str, model: str) -> Invocation:
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "local"\ncheck_for_update_on_startup = false\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        "request_max_retries = 0\nstream_max_retries = 0\n[analytics]\nenabled = false\n"
    )
    return Invocation(("exec", "--skip-git-repo-check", PROMPT), {"CODEX_HOME": str(folder)})


def _claude_code(home: Path, url: str, model: str) -> Invocation:
    settings = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": KEY, "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_ERROR_REPORTING": "1",
    }  # fmt: skip
    return Invocation(("-p", PROMPT), settings)


def _opencode(home: Path, url: str, model: str) -> Invocation:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {model: {"limit": {"context": 65_536, "output": 4096}}},
    }
    named = {"model": f"local/{model}", "small_model": f"local/{model}", "enabled_providers": ["local"]}
    settings = {"autoupdate": False, "share": "disabled", "provider": {"local": provider}, **named}
    (home / "work" / "opencode.json").write_text(json.dumps(settings))
    off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    return Invocation(("run", PROMPT), {f"OPENCODE_DISABLE_{name}": "1" for name in off})


def _continue(home: Path, url: str, model: str) -> Invocation:
    file = home / "config.yaml"
    file.write_text(
        f"name: local\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: {model}\n    provider: openai\n"
        f"    model: {model}\n    apiBase: {url}/v1\n    apiKey: {KEY}\n    roles: [chat]\n"
    )
    off = {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_ENABLE_TELEMETRY": "0"}
    return Invocation(("--config", str(file), "--auto", "-p", PROMPT), off)


def _qwen_code(home: Path, url: str, model: str) -> Invocation:
    settings = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": model}
    return Invocation(("--auth-type", "openai", "-y", PROMPT), settings | {"QWEN_TELEMETRY_ENABLED": "0"})


REAL_CLIENTS = (
    RealClient("codex", "@openai/codex", "codex", _codex),
    RealClient("claude_code", "@anthropic-ai/claude-code", "claude", _claude_code),
    RealClient("opencode_chat", "opencode-ai", "opencode", _opencode),
    RealClient("continue", "@continuedev/cli", "cn", _continue),
    RealClient("qwen_code", "@qwen-code/qwen-code", "qwen", _qwen_code),
)
