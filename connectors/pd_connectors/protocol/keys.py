"""Where the cluster's shared key comes from. Every process that has it can hand out tickets."""

from __future__ import annotations

import os
import secrets
from hashlib import blake2b
from pathlib import Path

KEY_ENV = "PD_CLUSTER_KEY"


def load_cluster_key(key_file: str = "") -> bytes:
    """The key from `key_file`, else from $PD_CLUSTER_KEY, else this user's own (made at first use, mode 0600).

    The last one serves nodes of one user on one machine; nodes on several machines need one of the others.
    Raises OSError when a file cannot be read, ValueError when it is empty or this user has no directory for a key.
    """
    if key_file:
        secret = _read(Path(key_file))
    else:
        secret = os.environ.get(KEY_ENV, "").strip() or _user_key()
    return derive_key(secret)


def derive_key(secret: str) -> bytes:
    """The key that a secret stands for: 32 bytes."""
    return blake2b(secret.strip().encode(), digest_size=32, person=b"pd-cluster-key").digest()


def _user_key() -> str:
    try:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pd-cluster"
    except RuntimeError as error:  # a user id without an entry in the user database, and no $HOME
        raise ValueError(f"this user has no home directory for one: set ${KEY_ENV}, the same at all nodes") from error
    path = base / "key"
    if not path.exists():
        try:
            base.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise OSError(f"{error}: set ${KEY_ENV}, the same at all nodes, or $XDG_CONFIG_HOME") from error
        draft = base / f"key.{os.getpid()}.{secrets.token_hex(4)}"
        draft.touch(mode=0o600)
        draft.write_text(secrets.token_hex(32), encoding="utf-8")
        try:
            os.link(draft, path)  # atomic, and never replaces a key that another process made first
        except FileExistsError:
            pass  # that one is the cluster's key
        finally:
            draft.unlink()
    return _read(path)


def _read(path: Path) -> str:
    secret = path.read_text(encoding="utf-8").strip()
    if not secret:  # its key could be computed without the file
        raise ValueError(f"the cluster key file {path} is empty")
    return secret
