"""A run in tables: what struck, what came of it, and what the gateway holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from tests.chaos.outcomes import Verdict
from tests.chaos.run import Outcome, Result, Run
from tests.chaos.schedule import Kind


class Progress:
    """A bar on stderr that moves with every outcome."""

    def __init__(self, total: int) -> None:
        self._bar = Bar(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("generations", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, outcome: Outcome) -> None:
        self._bar.advance(self._task)


def print_report(run: Run, result: Result, console: Console | None = None) -> None:
    console = console or Console()
    console.print(_faults(run, result), _errors(result), _growth(result), sep="\n")
    resumes = sum(outcome.got.resumes for outcome in result.outcomes)
    console.print(
        f"{len(result.outcomes)} generations in {result.seconds:.1f} s, {resumes} resumes, "
        f"{result.left_open} unfinished decodes left open"
    )
    for problem in result.problems(run):
        console.print(Text(problem, style="red"))


def _faults(run: Run, result: Result) -> Table:
    title = f"{run.setting}; {run.rate:.0%} of {run.scope}, seed {run.seed}"
    table = Table(title=title, title_justify="left")
    for name in ("fault", "struck", "generations", *Verdict, "resumes"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    by_trial = {outcome.question.trial: outcome for outcome in result.outcomes}
    hit: dict[str, set[int]] = {kind: set() for kind in Kind}
    for fired, trial in result.fired:
        if trial in by_trial:
            hit[fired.fault.kind].add(trial)
    counts = Counter(fired.fault.kind for fired, _ in result.fired)
    for kind in Kind:
        table.add_row(kind, str(counts[kind]), *_cells(by_trial[t] for t in hit[kind]))
    untouched = by_trial.keys() - set().union(*hit.values())
    table.add_row(
        "none itself", "", *_cells(by_trial[trial] for trial in untouched), end_section=True
    )
    table.add_row("all", str(len(result.fired)), *_cells(result.outcomes))
    return table


def _cells(outcomes: Iterable[Outcome]) -> list[str]:
    listed = list(outcomes)
    verdicts = Counter(outcome.verdict for outcome in listed)
    resumes = sum(outcome.got.resumes for outcome in listed)
    return [str(n) for n in (len(listed), *(verdicts[v] for v in Verdict), resumes)]


def _errors(result: Result) -> Table:
    table = Table("error told", "begun", "generations", title_justify="left")
    told = [o for o in result.outcomes if o.verdict is Verdict.ERROR]
    counts = Counter((o.got.code, o.got.status == 200) for o in told)
    for (code, begun), count in sorted(counts.items()):
        table.add_row(code, "yes" if begun else "no", str(count))
    return table


def _growth(result: Result) -> Table:
    table = Table("after", "RSS MiB", "fds but upstream", "upstream", "threads")
    for when, one in zip(("the first 100", "all"), result.samples, strict=False):
        counts = (one.fds, one.upstream, one.threads)
        table.add_row(when, f"{one.rss_mib:.1f}", *map(str, counts))
    return table
