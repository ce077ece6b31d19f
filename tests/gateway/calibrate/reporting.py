"""Made-up evidence for reports, by the real statistics over made-up traces."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from gateway.calibrate.report import Evidence, Example, Prefix
from relaygen.calibration.projection import Replayed, Speeds, replayed, roles
from relaygen.calibration.segments import Span
from relaygen.calibration.selection import (
    Choice,
    CueStatistic,
    Selection,
    gather,
    select,
)
from relaygen.calibration.statistics import Comparison
from relaygen.calibration.traces import Score, Scored, Trace
from relaygen.events import Role
from relaygen.policy import Policy, load_policy

EASE = {
    "So": 0.985, "Therefore": 0.99, "Thus": 0.985, "Now": 0.96, "Let me": 0.93, "Next": 0.95,
    "Wait": 0.72, "Hmm": 0.78, "But": 0.83, "Alternatively": 0.75, "Then": 0.93, "Also": 0.97,
    "However": 0.82, "Again": 0.96, "Hence": 0.98, "Maybe": 0.74, "Similarly": 0.985, "Oh": 0.88,
    "因此": 0.98, "等等": 0.7,
}  # fmt: skip
"""By cue, how often the scorer agrees with the sentence after it."""

_BODIES = (
    "the sum of both sides is {n} and the rest follows",
    "we need the number of ways to choose {n} of them, which I should count with some care",
    "that gives x = {n} when the equation is solved for it",
    "{n} divides the product, so the remainder is what matters here",
    "the second case is like the first one but with {n} in place of the old bound",
    "I could try to write it as a square plus {n} and see whether that helps",
)


def policy(cues: Sequence[str]) -> Policy:
    words = ", ".join(f'"{cue}"' for cue in cues)
    return load_policy(policy_text(words), "made-up.yaml")


def policy_text(words: str) -> str:
    return (
        "# Written by `relaygen calibrate`.\nversion: 1\nname: made-up-pair\n"
        "large: {backend: large, model: Made/Up-32B}\n"
        "small: {backend: small, model: Made/Up-1.7B}\n"
        f"cues:\n  match: word\n  words: [{words}]\n"
    )


def scored(number: int, sentences: int = 24, ease: dict[str, float] = EASE) -> Scored:
    """A trace of so many sentences of thinking and a short answer."""
    rng = random.Random(number)
    texts, hits, margins, own = ["<think>", "\n"], [True, True], [0.99, 0.9], [1.0, 1.0]
    for _ in range(sentences):
        cue = rng.choice([*ease, "The", "We", "This"])
        right = rng.random() < ease.get(cue, 0.9)
        sentence = f"{cue}, {rng.choice(_BODIES).format(n=rng.randint(2, 99))}."
        tokens = re.findall(r"\s?[^\s.,]+|[.,]", " " + sentence)
        miss = len(tokens) if right else rng.randrange(3, len(tokens))
        for i, token in enumerate(tokens):
            texts.append(token)
            hits.append(i != miss)
            margins.append(round(_margin(rng, 0.35 if i < 3 else 0.75 + right * 0.1), 4))
            own.append(0.97 if i == miss else round(_margin(rng, 0.85), 4))
    texts += ["</think>", "\n\n", "The", " answer", " is", f" {number}", "."]
    extra = len(texts) - len(hits)
    trace = Trace(
        id=f"made-up-{number}",
        question=f"How many ways are there to write {number + 7} as a sum of distinct squares?",
        prompt="", prompt_ids=(), texts=tuple(texts), ids=(),
        margins=(*own, *[0.99] * extra), finish="stop", first_s=0.1, total_s=9.0,
    )  # fmt: skip
    score = Score(trace.id, "small", (*margins, *[0.97] * extra), (*hits, *[True] * extra))
    return Scored(trace, score)


def _with_easy_cues(selection: Selection) -> Selection:
    """The same numbers, but a choice that does not hang on how strict the statistics are."""
    easy = {cue for cue, ease in EASE.items() if ease > 0.955}
    why = {True: "its text is easier than the whole", False: "too often wrong (below 0.95)"}
    cues = [
        replace(cue, chosen=cue.cue in easy, why=why[cue.cue in easy]) for cue in selection.cues
    ]
    return replace(selection, cues=tuple(cues))


def _margin(rng: random.Random, sure: float) -> float:
    return 1 - 0.002 * rng.random() if rng.random() < sure else rng.random()


@cache
def evidence(traces: int = 40, sentences: int = 20, examples: int = 2) -> Evidence:
    """What a run over so many traces would report."""
    many = [scored(n, sentences) for n in range(traces)]
    choice = Choice(draws=200)
    rules = policy([*EASE])
    statistics = gather(many, [rules.cue_set], rules.boundary_set, rules.thinking, choice)
    selection = _with_easy_cues(select(statistics))
    cues = tuple(cue.cue for cue in selection.chosen)
    prefixes = tuple(
        Prefix(cues[:n], replayed(policy(cues[:n]), many, choice.sure))
        for n in range(len(cues) + 1)
    )
    final = policy(cues)
    many.sort(key=lambda one: replayed(final, [one], choice.sure).clean)  # the wrong ones first
    return Evidence(
        selection=selection,
        prefixes=prefixes,
        speeds=Speeds(large_ms=9.4, small_ms=4.1, handoff_ms=6.0),
        policy=policy_text(", ".join(f'"{cue}"' for cue in cues)),
        examples=tuple(Example(one, tuple(roles(final, one.trace))) for one in many[:examples]),
        provenance={
            "date": "2026-03-01",
            "large": "Made/Up-32B on vLLM 0.32.0",
            "small": "Made/Up-1.7B on vLLM 0.32.0",
            "prompts": "amc23.jsonl, sha256 5f1d…e2",
            "rule": f"{choice.rule}, at least {choice.least}",
        },
        title="Calibration of made-up-pair",
    )


# ---- by hand ------------------------------------------------------------------------------------

NAN = float("nan")


def statistic(cue: str, *, chosen: bool = True, known: bool = True, **more: object) -> CueStatistic:
    compared = (
        Comparison(0.971, 0.01, 0.052, 0.031, 0.074, 0.001)
        if known
        else Comparison(0.8, NAN, -0.1, NAN, NAN, 1.0)
    )
    values: dict[str, object] = {
        "cue": cue, "count": 137, "traces": 41, "tokens": 13.4, "spread": 0.1,
        "compared": compared, "corrected": 0.0123 if known else 1.0, "chosen": chosen,
        "why": "its text is easier than the whole" if chosen else "too often wrong (below 0.95)",
    }  # fmt: skip
    return CueStatistic(**{**values, **more})  # type: ignore[arg-type]


def by_hand(*cues: CueStatistic, texts: Sequence[str] = ("Thus", " it", " is", ".")) -> Evidence:
    """Evidence of exactly these cues and a trace whose first token is the large model's."""
    count = len(texts)
    selection = Selection(Choice(), 0.919, 1, count, 0, cues)
    chosen = tuple(cue.cue for cue in selection.chosen)
    trace = Trace(
        id="one", question="Why?", prompt="", prompt_ids=(), texts=tuple(texts), ids=(),
        margins=(0.95,) * count, finish="stop", first_s=0.1, total_s=1.0,
    )  # fmt: skip
    score = Score("one", "small", (0.9,) * count, (True,) * count)
    split = (Role.LARGE, Span(0, 1)), (Role.SMALL, Span(1, count))
    return Evidence(
        selection=selection,
        prefixes=tuple(
            Prefix(chosen[:n], Replayed(1, 60 - n, 40 + n, 8, 4, 1)) for n in range(len(chosen) + 1)
        ),
        speeds=Speeds(20.0, 5.0, 3.0),
        policy=policy_text("Thus"),
        examples=(Example(Scored(trace, score), split),),
        provenance={"date": "2026-03-01"},
    )
