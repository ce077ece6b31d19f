"""The `relaygen` command."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gateway.calibrate.arguments import add_arguments as add_calibrate_arguments
from gateway.demo.llamacpp import add_arguments as add_engine_arguments
from gateway.demo.llamacpp import serve_bundled
from gateway.demo.main import add_arguments as add_demo_arguments
from gateway.demo.main import run as run_demo
from gateway.policies import read_policy
from gateway.settings import Settings, SettingsError, load_settings
from relaygen.errors import PolicyError
from relaygen.policy import Policy, policy_warnings
from relaygen.policy_diff import cue_differences, differences
from relaygen.replay import Segment, replay

_Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status (1: the user's input is wrong, 2: usage)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _parser()
    options = parser.parse_args(arguments)
    options.argv = arguments
    try:
        return commands[options.command](options)
    except (SettingsError, PolicyError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


def _parser() -> tuple[argparse.ArgumentParser, dict[str, _Command]]:
    parser = argparse.ArgumentParser(
        prog="relaygen", description="One generation, two models: a streaming LLM gateway."
    )
    parser.add_argument("--version", action="version", version=f"relaygen {version('relaygen')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _serve_arguments(commands.add_parser("serve", help="run the gateway"))
    add_demo_arguments(
        commands.add_parser("demo", help="see it work on two tiny models, on this machine")
    )
    add_engine_arguments(
        commands.add_parser("engine", help="serve one of the two tiny models, by llama.cpp")
    )
    add_calibrate_arguments(
        commands.add_parser("calibrate", help="find a pair's cues from what its models write")
    )
    _bench_arguments(
        commands.add_parser("bench", help="measure what the gateway costs, on simulated engines")
    )
    policy = commands.add_parser("policy", help="check and compare policies, print their schema")
    actions = policy.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="validate policy files; exit 1 if one is wrong")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE")
    compare = actions.add_parser(
        "diff", help="tell how two policies differ; exit 1 if they do, 2 if one is wrong"
    )
    compare.add_argument("old", type=Path, metavar="A")
    compare.add_argument("new", type=Path, metavar="B")
    actions.add_parser("schema", help="print the policy's JSON Schema")
    key = commands.add_parser("key", help="make a client's API key, and its entry for gateway.yaml")
    key.add_argument("name", nargs="?", metavar="NAME", help="what logs call it")
    _replay_arguments(
        commands.add_parser("replay", help="show which model would have written what of a text")
    )
    return parser, {
        "serve": _serve,
        "demo": _demo,
        "engine": serve_bundled,
        "calibrate": _calibrate,
        "bench": _bench,
        "policy": _policy,
        "key": _key,
        "replay": _replay,
    }


# ---- serve --------------------------------------------------------------------------------------


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings, as in docs/settings.md"
    )
    policies = parser.add_mutually_exclusive_group()
    policies.add_argument("--policies", type=Path, metavar="DIR", help="folder of policies")
    policies.add_argument(
        "--policy", type=Path, action="append", metavar="FILE", help="one policy; may be repeated"
    )
    for role in ("large", "small"):
        parser.add_argument(
            f"--{role}",
            action="append",
            metavar="URL",
            help=f"server of the {role} model, ending in /v1; repeat for more replicas",
        )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8080); 0 takes a free one")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that share the port")
    parser.add_argument(
        "--print-settings", action="store_true", help="print the settings in force and exit"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def _serve(options: argparse.Namespace) -> int:
    """0: ended as told to; 1: settings, a policy or an address can't be used."""
    if options.print_settings:
        print(_shown(load_settings(_flags(options), options.config)))
        return 0
    from gateway import log, server, tls
    from gateway.reloading import Source

    source = Source(_flags(options), options.config)
    settings = source.read()
    tls.check(settings)
    _check_policies(settings)
    if settings.workers > 1 and not options.worker:
        _check_shared(settings)
        return server.serve_workers(settings.workers, options.argv)
    log.configure(settings.log)
    try:
        server.run(settings, source, worker=options.worker)
    except server.ListenError as error:
        raise SettingsError(str(error)) from None
    return 0


def _check_policies(settings: Settings) -> None:
    for path in settings.policy_files:
        read_policy(path)  # a file named on purpose must be right; one in a folder is refused alone
    if not settings.policy_files and not settings.policies.is_dir():
        raise SettingsError(
            f"settings: policies: {settings.policies} is no folder; give one with --policies DIR, "
            "or a policy with --policy FILE"
        )


def _check_shared(settings: Settings) -> None:
    for field, port in (("port", settings.port), ("admin.port", settings.admin.port)):
        if port == 0:
            raise SettingsError(f"settings: {field}: 0 can't be shared by workers; name a port")


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    given = {
        "host": options.host,
        "port": options.port,
        "workers": options.workers,
        "policies": options.policies,
        "policy_files": options.policy,
    }
    flags = {key: value for key, value in given.items() if value is not None}
    urls = {"large": options.large, "small": options.small}
    backends = {role: {"urls": found} for role, found in urls.items() if found}
    return {**flags, "backends": backends} if backends else flags


def _shown(settings: Settings) -> str:
    import yaml

    return yaml.safe_dump(json.loads(settings.model_dump_json()), sort_keys=False).rstrip()


# ---- demo ---------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
    return asyncio.run(run_demo(options))


def _calibrate(options: argparse.Namespace) -> int:
    from gateway.calibrate.command import run  # its libraries take a while to load

    return run(options)


# ---- bench --------------------------------------------------------------------------------------


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a minute: less of everything")
    parser.add_argument("--only", metavar="NAME,...", help="these scenarios alone")
    parser.add_argument("--json", metavar="FILE", help="write the rows to a file as well")


def _bench(options: argparse.Namespace) -> int:
    from gateway.bench.command import run

    return run(options)


# ---- key ----------------------------------------------------------------------------------------


def _key(options: argparse.Namespace) -> int:
    import yaml

    from gateway.keys import fresh_entry

    key, entry = fresh_entry(options.name)
    print(f"# For the client. It is told here only:\n{key}\n")
    print("# For gateway.yaml, which needs its SHA-256 only:")
    print(yaml.safe_dump({"api_keys": [entry]}, sort_keys=False).rstrip())
    return 0


# ---- policy -------------------------------------------------------------------------------------


def _policy(options: argparse.Namespace) -> int:
    if options.action == "schema":
        print(json.dumps(Policy.model_json_schema(), indent=2))
        return 0
    if options.action == "diff":
        return _diff(options.old, options.new)
    return max(_check(path) for path in options.files)


def _check(path: Path) -> int:
    try:
        policy = read_policy(path)
    except PolicyError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 1
    for warning in policy_warnings(policy, str(path)):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{path}: policy {policy.name!r} is valid")
    return 0


def _diff(old: Path, new: Path) -> int:
    """As diff(1) has it: 0 for no difference, 1 for some, 2 for trouble."""
    try:
        one, other = read_policy(old), read_policy(new)
    except PolicyError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    fields, cues = differences(one, other), cue_differences(one, other)
    for field in fields:
        print(f"{field.field}: {_yaml(field.old)} -> {_yaml(field.new)}")
    for cue in cues:
        found = ", ".join(f"{key} {value:g}" for key, value in cue.found.items())
        told = f"  ({found})" if found else ""
        print(f"cues.words: {'+' if cue.added else '-'} {_yaml(cue.word)}{told}")
    return 1 if fields or cues else 0


def _yaml(value: object) -> str:
    return "(none)" if value is None else json.dumps(value, ensure_ascii=False)


# ---- replay -------------------------------------------------------------------------------------


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--format", choices=("text", "jsonl"), default="text", help="of the output (text)"
    )
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="a text; - is stdin")


def _replay(options: argparse.Namespace) -> int:
    policy = read_policy(options.policy)
    segments = replay(policy, _text(options.file))
    if options.format == "jsonl":
        for segment in segments:
            print(json.dumps(_record(segment), ensure_ascii=False))
    else:
        _print_segments(segments)
    return 0


def _text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"replay: {file} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"replay: {file} is not UTF-8: {error}") from None


def _record(segment: Segment) -> dict[str, str | None]:
    return {"role": segment.role, "text": segment.text, "trigger": segment.trigger}


def _print_segments(segments: Iterable[Segment]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    for segment in segments:
        colour = "cyan" if segment.role == "large" else "yellow"
        console.print(Text(f"{segment.role:5} ", style=f"bold {colour}"), end="")
        console.print(Text(segment.text.replace("\n", "⏎"), style=colour), end="")
        console.print(Text(f"  [{segment.trigger}]" if segment.trigger else "", style="dim"))
