"""What a command needs of the process that it runs in, made or missed in one line before anything starts."""

from __future__ import annotations

import getpass
import io
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError
from pd_http.files import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

MIN_FILES = 128  # the engine, its sockets and 64 in reserve; `up` with two nodes and a router stops at 40


def open_streams() -> None:
    """Give the process its three streams, and let them write any text.

    A closed one would become a socket's descriptor, which the next start of a child closes. A locale without UTF-8 has
    no letters for some names: these are written as escapes.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def prepare(environ: MutableMapping[str, str]) -> None:
    """Raise the limit of open files, and name places for caches in `environ`. Raises StartupError.

    For commands that serve or compute.
    """
    try:
        here = os.getcwd()
    except OSError as error:
        raise StartupError(f"the working directory is gone, change to another one: {error}") from error
    if (limit := raise_file_limit()) < MIN_FILES:
        raise StartupError(f"{limit} open files are allowed and {MIN_FILES} needed: raise the limit (ulimit -Hn)")
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError as error:
        raise StartupError(f"no directory for temporary files can be written, set $TMPDIR: {error.strerror}") from error
    check_texts((here, str(temporary)))
    name_user(environ)
    name_caches(environ, Path(os.path.expanduser("~")), temporary)  # a Path raises without a home


def check_texts(texts: Iterable[str]) -> None:
    """Raise StartupError for a path or an argument with bytes that the locale has no letters for.

    Python keeps them as lone surrogates, which are no text in a message to the engine, in JSON or to ZeroMQ.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            shown = os.fsencode(text).decode("utf-8", "backslashreplace")
            raise StartupError(
                f"this locale has no letters for {shown}: set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
            ) from error


def name_user(environ: MutableMapping[str, str]) -> None:
    """Name the user if the user database does not: torch's compiler asks for the name of its cache."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        environ["LOGNAME"] = f"uid-{os.getuid()}"


def name_caches(environ: MutableMapping[str, str], home: Path, temporary: Path) -> None:
    """Where the home cannot be written, name a directory of this user for what libraries compile there.

    Without a home their caches would be a directory named ~ in the working directory, or fail at the first kernel. The
    cache of downloads stays where there is a home: it may hold models, and only be read.
    """
    wanted = {"TRITON_CACHE_DIR": "triton", "MPLCONFIGDIR": "matplotlib"}
    if not home.is_absolute():
        wanted["HF_HOME"] = "huggingface"
    elif os.access(home, os.W_OK | os.X_OK):
        return
    if missing := wanted.keys() - environ.keys():
        base = own_directory(temporary)
        environ.update({name: str(base / wanted[name]) for name in missing})


def own_directory(temporary: Path) -> Path:
    """A directory that no other user can write: what is compiled is loaded again."""
    path = temporary / f"pd-cluster-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return path
    except OSError:
        pass  # another user's file
    return Path(tempfile.mkdtemp(prefix="pd-cluster-", dir=temporary))
