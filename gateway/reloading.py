"""Settings and policies read again while the gateway runs: on SIGHUP, or when the file changes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web
from pydantic import BaseModel

from gateway import metrics, tls
from gateway.backends import Replica, ReplicaSet
from gateway.context import Gateway
from gateway.policies import file_stamp
from gateway.settings import Backend, Settings, SettingsError, load_settings

log = structlog.get_logger()

_LOOK_S = 1.0
RELOADED = ("api_keys", "backends", "limits", "models", "shadow")
"""Settings that take effect without a restart."""


class Source:
    """Where settings come from: flags, the environment and a file."""

    def __init__(self, flags: Mapping[str, Any], config: Path | None) -> None:
        self._flags = flags
        self._config = config
        self._seen: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return str(self._config) if self._config else "(flags and environment)"

    @property
    def changed(self) -> bool:
        """Whether the file is another than the one that was read last."""
        return self._config is not None and file_stamp(self._config) != self._seen

    def read(self) -> Settings:
        """Raises SettingsError."""
        # Before it is read: what is written meanwhile is seen at the next look.
        self._seen = file_stamp(self._config) if self._config else None
        return load_settings(dict(self._flags), self._config)


class Reloader:
    """Brings what can change into the running gateway, all of it or nothing."""

    def __init__(
        self,
        gateway: Gateway,
        source: Source | None,
        make: Callable[[str, Backend], ReplicaSet],
        watchers: Watchers,
    ) -> None:
        self._gateway = gateway
        self._source = source
        self._make = make
        self._watchers = watchers
        self._asked = asyncio.Event()
        self.listening: ssl.SSLContext | None = None
        """The gateway's own TLS, whose certificate may have been renewed."""

    def ask(self) -> None:
        """Read everything again at once."""
        self._asked.set()

    async def watch(self) -> None:
        """Runs until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), _LOOK_S)
            asked = self._asked.is_set()
            self._asked.clear()
            if asked:
                await asyncio.to_thread(self._gateway.policies.load)
            if self._source and (asked or self._source.changed):
                await self._reload(self._source)

    async def _reload(self, source: Source) -> None:
        refused = self._gateway.refused
        try:
            settings = await asyncio.to_thread(source.read)
            await asyncio.to_thread(tls.check, settings)
            self._renew_certificate()
        except SettingsError as error:
            refused[source.name] = str(error).splitlines()
            log.warning("settings refused", problems=refused[source.name], old_ones_stay=True)
            return
        refused.pop(source.name, None)
        changed = list(_changed(self._gateway.settings, settings))
        self._apply(settings)
        effective = [key for key in changed if key.partition(".")[0] in RELOADED]
        log.info("settings loaded", changed=effective)
        if waiting := [key for key in changed if key not in effective]:
            log.warning("settings changed that need a restart", keys=waiting)

    def _renew_certificate(self) -> None:
        own = self._gateway.settings.tls
        if self.listening and own.cert and own.key:
            tls.load_certificate(self.listening, own.cert, own.key)

    def _apply(self, settings: Settings) -> None:
        gateway = self._gateway
        gateway.keys.replace(settings.api_keys)
        gateway.admission.replace(settings.limits)
        self._update_backends(settings.backends)
        changed = {name: getattr(settings, name) for name in RELOADED}
        gateway.settings = gateway.settings.model_copy(update=changed)

    def _update_backends(self, backends: Mapping[str, Backend]) -> None:
        old = self._gateway.backends
        for name in old.keys() - backends.keys():
            metrics.replicas(name, {})
        for name in old.keys() & backends.keys():
            old[name].update(backends[name])
        # A new mapping: what runs keeps a backend that is gone.
        new = {name: old.get(name) or self._make(name, b) for name, b in backends.items()}
        self._gateway.backends = new
        self._gateway.relaying = replace(self._gateway.relaying, backends=new)
        self._watchers.follow(new.values())


RELOADER = web.AppKey("reloader", Reloader)


class Watchers:
    """A task for each replica that looks whether it is up."""

    def __init__(self) -> None:
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    def follow(self, replica_sets: Iterable[ReplicaSet]) -> None:
        """Exactly the replicas that these have now."""
        replicas = [replica for found in replica_sets for replica in found.replicas]
        for gone in self._tasks.keys() - set(replicas):
            self._tasks.pop(gone).cancel()
        for replica in replicas:
            if replica not in self._tasks:
                self._tasks[replica] = started(replica.watch())

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self.follow(())
        await asyncio.gather(*tasks, return_exceptions=True)


def started(watcher: Any) -> asyncio.Task[None]:
    """A task in the background; the log tells if it dies."""
    task: asyncio.Task[None] = asyncio.create_task(watcher)
    task.add_done_callback(_tell)
    return task


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a watcher died", exc_info=error)


def _changed(old: BaseModel, new: BaseModel, prefix: str = "") -> Iterator[str]:
    """Keys whose values differ, those of sections after a dot."""
    for name in type(old).model_fields:
        was, now = getattr(old, name), getattr(new, name)
        if isinstance(was, BaseModel):
            yield from _changed(was, now, f"{prefix}{name}.")
        elif was != now:
            yield prefix + name
