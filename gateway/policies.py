"""The policies that are served: read from files, read again when they change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import structlog

from relaygen.errors import PolicyError, Problem
from relaygen.policy import Policy, load_policy, policy_warnings
from relaygen.policy_yaml import MAX_CHARS, too_large

log = structlog.get_logger()

_LOOK_S = 1.0
_SUFFIXES = (".yaml", ".yml", ".json")


def read_policy(path: Path) -> Policy:
    """The policy in a file. PolicyError names the file and every problem."""
    source = str(path)
    try:
        text = _text(path)
    except OSError as error:
        raise PolicyError([Problem(source, "(file)", f"can't be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        raise PolicyError([Problem(source, "(file)", f"is not UTF-8: {error}")]) from None
    return load_policy(text, source)


def _text(path: Path) -> str:
    """Of no more than a policy may have; what is no file (a pipe, say) is never waited for."""
    if path.exists() and not path.is_file():
        message = "is no regular file"
        raise PolicyError([Problem(str(path), "(file)", message, "put the policy's YAML there")])
    with path.open("rb") as file:
        content = file.read(MAX_CHARS + 1)
    if len(content) > MAX_CHARS:
        raise too_large(str(path))
    return content.decode()


class PolicyStore:
    """Policies by name. A file that turns bad is refused and its old policy stays."""

    def __init__(self, folder: Path, files: Iterable[Path] = ()) -> None:
        self._folder = folder
        self._files = tuple(files)
        self._loaded: dict[Path, Policy] = {}
        self._seen: dict[Path, tuple[int, int]] = {}
        self._loading = threading.Lock()
        self.problems: dict[str, list[str]] = {}
        """By file: why its present content is not served."""

    @property
    def by_name(self) -> Mapping[str, Policy]:
        return {policy.name: policy for policy in self._loaded.values()}

    def load(self) -> None:
        """Reads what is new or changed since the last call."""
        with self._loading:
            self._load()

    def _load(self) -> None:
        stamps = {path: file_stamp(path) for path in self._paths()}
        if stamps == self._seen:
            return
        for path in self._loaded.keys() - stamps.keys():
            log.info("policy removed", file=str(path), policy=self._loaded[path].name)
        # Replaced as a whole: a reload runs in a thread, beside requests that look policies up.
        self._loaded = {path: policy for path, policy in self._loaded.items() if path in stamps}
        self.problems = {file: p for file, p in self.problems.items() if Path(file) in stamps}
        for path, stamp in stamps.items():
            # What was refused may only have waited for another file to change.
            if self._seen.get(path) != stamp or str(path) in self.problems:
                self._read(path)
        self._seen = stamps

    def _read(self, path: Path) -> None:
        try:
            policy = read_policy(path)
            self._refuse_double(policy, path)
        except PolicyError as error:
            problems = [str(problem) for problem in error.problems]
            self.problems = {**self.problems, str(path): problems}
            kept = path in self._loaded
            log.warning("policy refused", problems=problems, old_one_stays=kept)
            return
        self.problems = {file: p for file, p in self.problems.items() if file != str(path)}
        self._loaded = {**self._loaded, path: policy}
        log.info("policy loaded", file=str(path), policy=policy.name)
        for warning in policy_warnings(policy, str(path)):
            log.warning("policy warning", problem=str(warning))

    def _refuse_double(self, policy: Policy, path: Path) -> None:
        for other, loaded in self._loaded.items():
            if other != path and loaded.name == policy.name:
                message = f"{policy.name!r} is already the name of {other}"
                raise PolicyError([Problem(str(path), "name", message, "give it another name")])

    def _paths(self) -> list[Path]:
        if self._files:
            return list(self._files)
        try:
            return sorted(p for p in self._folder.iterdir() if p.suffix in _SUFFIXES)
        except OSError:  # none yet, or just being replaced
            return []

    async def watch(self) -> None:
        """Reloads changed files. Runs until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(self.load)


def file_stamp(path: Path) -> tuple[int, int]:
    """Another one after the file has changed."""
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)
