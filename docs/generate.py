"""Writes what docs/ takes from the code: python docs/generate.py [--check].

Each generated part stands between `<!-- NAME: generated -->` and `<!-- end NAME -->`. With
--check nothing is written; the exit status is 1 where a page is behind the code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gateway.collectors import Metrics
from gateway.settings import Settings
from relaygen.policy import Policy
from relaygen.state import diagram

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent))  # where the tests are, which play the faults
from tests.gateway.faults import rows  # noqa: E402 - needs the line before


def main() -> int:
    behind = [page.name for page in sorted(DOCS.glob("*.md")) if not _write(page)]
    if behind:
        sys.stderr.write(f"behind the code: {', '.join(behind)}; run: make docs\n")
    return 1 if behind else 0


def _write(page: Path) -> bool:
    """Brings a page up to date; False where it was behind and --check keeps it so."""
    old = page.read_text(encoding="utf-8")
    new = old
    for name, content in _PARTS.items():
        pattern = rf"(<!-- {name}: generated -->\n).*?(<!-- end {name} -->)"
        text = content()
        new = re.sub(pattern, lambda m, text=text: m[1] + text + m[2], new, flags=re.DOTALL)
    if new == old:
        return True
    if "--check" in sys.argv:
        return False
    page.write_text(new, encoding="utf-8")
    return True


def _diagram() -> str:
    return f"```mermaid\n{diagram()}```\n"


def _table(model: type[BaseModel], heading: str) -> str:
    rows = "\n".join(f"| `{k}` | {t} | {d} | {text} |" for k, t, d, text in rows_of(model))
    return f"| {heading} | type | default | |\n|---|---|---|---|\n{rows}\n"


def rows_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and description of every setting, sections gone into."""
    for name, field in model.model_fields.items():
        key, inner = prefix + name, field.annotation
        named = get_origin(inner) is dict and _is_model(get_args(inner)[1])
        if named:
            key, inner = f"{key}.NAME", get_args(inner)[1]
        elif get_origin(inner) is tuple and (entry := _bare(get_args(inner)[0])) is not None:
            yield key, "list", _default(field), field.description or ""
            key, inner = f"{key}[]", entry
        if _is_model(inner):
            assert isinstance(inner, type)
            yield from rows_of(inner, f"{key}.")
        else:
            yield key, _type(field.annotation), _default(field), field.description or ""


def _bare(annotation: Any) -> type[BaseModel] | None:
    """The model of a list's entries, without what validates them."""
    model = getattr(annotation, "__origin__", annotation)
    return model if _is_model(model) else None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is None:
        values = getattr(annotation, "__members__", None)
        name = getattr(annotation, "__name__", str(annotation))
        return _either(m.value for m in values.values()) if values else _NAMES.get(name, name)
    if origin in (Union, UnionType):
        return " or ".join(_type(a) for a in arguments if a is not type(None))
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    if str(origin) == "typing.Literal":
        return _either(arguments)
    return _type(arguments[0])


_NAMES = {"str": "text", "int": "integer", "float": "number", "Path": "path", "SecretStr": "secret"}


def _either(values: Any) -> str:
    return " \\| ".join(f"`{value}`" for value in values)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value!s}`".replace("|", "\\|").replace("\n", "\\n")


def _metrics() -> str:
    """Of the collectors as they are registered: what they are called, and say of themselves."""
    rows = []
    for collector in vars(Metrics()).values():
        if isinstance(collector, MetricWrapperBase):
            [family] = collector.describe()
            total = "_total" if family.type == "counter" else ""
            labels = ", ".join(f"`{label}`" for label in collector._labelnames)
            rows.append(
                f"| `{family.name}{total}` | {family.type} | {labels} | {family.documentation} |"
            )
    return "| metric | type | labels | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


_PARTS: dict[str, Callable[[], str]] = {
    "state diagram": _diagram,
    "settings": lambda: _table(Settings, "key"),
    "policy": lambda: _table(Policy, "key"),
    "faults": rows.table,
    "metrics": _metrics,
}

if __name__ == "__main__":
    sys.exit(main())
