"""Downloads a model from the hub: the files that are read, and no others.

Repositories have the weights in several forms, two or three times as many bytes as are read.
"""

from __future__ import annotations

from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError
from pd_cluster.models.checkpoint_files import INDEX, SINGLE, complete_shards, shards_of_index, some
from pd_cluster.models.json_files import read_json
from pd_cluster.models.model_files import TEXTS, layout_problem, tokenizer_problem
from pd_cluster.models.model_kinds import check_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

# The hub's library matches whole paths, so a name is that of a file in the repository's root
_TEXTS = (
    *TEXTS, "tokenizer.*.json", "additional_chat_templates/*.jinja", "modules.json", "[0-9]*_*/config.json",
    "hf_quant_config.json",
)  # fmt: skip


def download(model: str) -> Path:
    """The directory of the model `owner/name`, with its files; what is there already is not downloaded again.

    Texts come first, and say which weights there are. Raises StartupError, before any weight is downloaded for a
    repository without a model that is served.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(model, allow_patterns=list(_TEXTS)))
        names = _names(model, directory.name)
        _check(model, directory, names)
        weights = [escape(name) for name in _weights(directory, names)]
        return Path(snapshot_download(model, revision=directory.name, allow_patterns=weights))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ImportError, ValueError) as error:
        # the last two: of a proxy in the environment that the library cannot use, such as socks5
        why = " ".join(str(error).split())
        raise StartupError(
            f"model {model!r} is not a directory and cannot be downloaded from the hub: {why}"
        ) from error


def _names(model: str, commit: str) -> list[str]:
    """The names in the repository, as the first download has listed them; none without a connection."""
    try:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
    except ImportError:  # an older library
        return []
    try:
        return [file.path for file in get_cached_repo_tree(model, revision=commit)]
    except CachedRepoTreeNotFoundError:
        return []


def _check(model: str, directory: Path, names: Sequence[str]) -> None:
    """Refuse what cannot be served, as far as names and config say it. Without names nothing is known."""
    of_root = [name for name in names if "/" not in name or name.endswith("/config.json") or name.startswith("onnx/")]
    what = names and (layout_problem(of_root) or tokenizer_problem(of_root, lambda package: True))
    if names and not what and (absent := set(_weights(directory, names)) - set(names)):
        what = f"lacks {some(absent)}, which {INDEX} names"
    if what:
        raise StartupError(f"{model} on the hub {what}")
    if (directory / "config.json").is_file():
        check_kind(directory, read_json(directory / "config.json"))


def _weights(directory: Path, names: Sequence[str]) -> list[str]:
    if (directory / INDEX).is_file():
        return shards_of_index(directory / INDEX)
    return [SINGLE] if SINGLE in names or not names else complete_shards(names)
