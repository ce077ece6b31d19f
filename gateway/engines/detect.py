"""Which dialect a server speaks, asked of the server itself."""

from __future__ import annotations

from gateway.engines.base import Engine
from gateway.engines.llamacpp import LlamaCppEngine
from gateway.engines.vllm import VllmEngine
from gateway.errors import RequestError, UpstreamError
from gateway.upstream import Upstream

DIALECTS: dict[str, type[Engine]] = {
    engine.dialect: engine for engine in (VllmEngine, LlamaCppEngine)
}


async def detect(upstream: Upstream, dialect: str) -> Engine:
    """The engine behind a URL; `dialect` "auto" looks at who it says owns its models.

    Raises UpstreamError where the server can't be reached or is none that we know.
    """
    if dialect != "auto":
        return DIALECTS[dialect](upstream)
    try:
        models = (await upstream.get("/v1/models")).get("data") or []
    except RequestError as error:
        raise UpstreamError(f"{upstream.url}/v1/models answered: {error.message}") from None
    owners = {model.get("owned_by") for model in models if isinstance(model, dict)}
    if "vllm" in owners:
        return VllmEngine(upstream)
    if "llamacpp" in owners:
        return LlamaCppEngine(upstream)
    known = ", ".join(DIALECTS)
    raise UpstreamError(
        f"The server at {upstream.url} is none that `engine: auto` recognises "
        f"(its models are owned by {sorted(map(str, owners))}); set `engine` to one of: {known}"
    )
