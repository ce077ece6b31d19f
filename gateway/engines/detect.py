"""Which dialect a server speaks, asked of the server itself."""

from __future__ import annotations

from typing import Any

from gateway.engines.base import Continuation, Engine
from gateway.engines.chat import Prefill
from gateway.engines.hosted import HostedEngine
from gateway.engines.llamacpp import LlamaCppEngine
from gateway.engines.sglang import SglangEngine
from gateway.engines.tgi import TgiEngine
from gateway.engines.vllm import VllmEngine
from gateway.errors import GatewayError, RequestError, UpstreamError
from gateway.settings import Backend
from gateway.upstream import Upstream

DIALECTS: dict[str, type[Engine]] = {
    engine.dialect: engine
    for engine in (VllmEngine, SglangEngine, TgiEngine, LlamaCppEngine, HostedEngine)
}
_NO_SUCH_PATH = (404, 405, 501)


async def detect(upstream: Upstream, backend: Backend) -> Engine:
    """The engine behind a URL; `engine: auto` looks at who it says owns its models.

    Raises UpstreamError where the server can't be reached or is none that we know.
    """
    dialect = backend.engine if backend.engine != "auto" else await _dialect(upstream)
    engine = DIALECTS[dialect](upstream, await _continuation(upstream, backend, dialect))
    if backend.prefill != "auto":
        engine.prefills = (Prefill(backend.prefill),)
        engine.prefill_given = True
    return engine


async def _dialect(upstream: Upstream) -> str:
    try:
        models = (await upstream.get("/v1/models")).get("data") or []
    except RequestError as error:
        raise UpstreamError(f"{upstream.url}/v1/models answered: {error.message}") from None
    owners = {model.get("owned_by") for model in models if isinstance(model, dict)}
    for dialect in ("vllm", "sglang", "llamacpp"):
        if dialect in owners:
            return dialect
    if await _is_tgi(upstream):
        return TgiEngine.dialect
    known = ", ".join(DIALECTS)
    raise UpstreamError(
        f"The server at {upstream.url} is none that `engine: auto` recognises "
        f"(its models are owned by {sorted(map(str, owners))}); set `engine` to one of: {known}"
    )


async def _is_tgi(upstream: Upstream) -> bool:
    """TGI says that its models are owned by their ids, but only it has such an /info."""
    try:
        info: Any = await upstream.get("/info")
    except GatewayError:
        return False
    return isinstance(info, dict) and "model_id" in info and "max_total_tokens" in info


async def _continuation(upstream: Upstream, backend: Backend, dialect: str) -> Continuation:
    if backend.continuation != "auto":
        return backend.continuation
    if dialect != HostedEngine.dialect:
        return "completions"
    try:
        await upstream.post("/v1/completions", {})  # refused for what it lacks, or not known
    except RequestError as error:
        if error.status in _NO_SUCH_PATH:
            return "chat"
    except UpstreamError:
        return "completions"
    return "completions"
