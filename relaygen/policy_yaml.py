"""A policy's YAML to plain data, within bounds: no text takes more than seconds."""

from __future__ import annotations

from typing import Any

import yaml

from relaygen.errors import PolicyError, Problem

MAX_CHARS = 1024 * 1024
MAX_NODES = 50_000
"""Keys, values, lists and mappings, each counted as often as aliases repeat it."""
MAX_DEPTH = 50
MAX_NUMBER_CHARS = 100
"""Python takes time quadratic in the digits of a number."""
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})


def parse(text: str, source: str) -> object:
    """The data in a YAML `text`. PolicyError says where in `source` it goes wrong."""
    if len(text) > MAX_CHARS:
        raise too_large(source)
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "(file)"
        message = getattr(error, "problem", None) or str(error)
        if context := getattr(error, "context", None):
            message = f"{context}: {message}"
        problem = Problem(source, where, f"not valid YAML: {message}", "correct it there")
        raise PolicyError([problem]) from None
    except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
        # PyYAML lets Python's own errors out for scalars like 2024-13-45 or `!!bool maybe`.
        message = f"a value that is not what it looks like to YAML: {error}"
        raise PolicyError([Problem(source, "(file)", message, "put it in quotes")]) from None


def too_large(source: str) -> PolicyError:
    message = f"is too large: a policy may have {MAX_CHARS} characters"
    remedy = "keep what was measured in another file, and its summary in the policy"
    return PolicyError([Problem(source, "(file)", message, remedy)])


class _Loader(yaml.SafeLoader):
    """A safe loader with bounds, which refuses a key given twice instead of taking the last.

    They are checked on the tree of nodes, before anything is built of it: aliases and merge keys
    (`<<`) let a few lines stand for billions of values.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._nodes = 0
        self._sizes: dict[int, int] = {}
        """How many nodes are in a finished one, by its id; itself counted."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._nodes
        if self._depth == MAX_DEPTH:
            raise _refusal(f"nested too deeply: at most {MAX_DEPTH} levels", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise _refusal(f"alias {event.anchor!r} is inside of what it stands for", event)
            self._nodes += self._sizes[id(node)]
        else:
            self._nodes += 1
            self._sizes[id(node)] = self._nodes - before
        if self._nodes > MAX_NODES:
            message = f"more than {MAX_NODES} values, what aliases repeat counted anew"
            raise _refusal(message, event)
        return node

    def compose_scalar_node(self, anchor: dict[Any, yaml.Node]) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER_CHARS:
            raise _refusal(f"a number of {len(node.value)} characters; put it in quotes", node)
        return node

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        # Here and not in construct_mapping, which sees merge keys (`<<`) already resolved.
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise _refusal(f"key {key.value!r} is given twice", key)
            seen.add((key.tag, key.value))
        return node


def _refusal(problem: str, at: Any) -> yaml.composer.ComposerError:
    """`at`: an event or a node."""
    return yaml.composer.ComposerError(None, None, problem, at.start_mark)
