"""The report's page: all facts are on it, nothing foreign acts in it, and odd evidence is shown."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gateway.calibrate.report import Example, write_report
from gateway.calibrate.report.grids import candidates, prefixes, provenance
from gateway.calibrate.report.page import html
from gateway.calibrate.report.svg import Scale, ticks
from gateway.calibrate.report.views import MAX_BARS, bars, blocks
from gateway.calibrate.report.wording import cut, visible, width
from relaygen.calibration.projection import Speeds
from relaygen.calibration.segments import Span
from relaygen.calibration.traces import Scored
from relaygen.events import Role
from tests.gateway.calibrate.reporting import by_hand, evidence, statistic

_VOID = frozenset({"meta", "br"})
_HOSTILE = (
    '<script>alert("x")</script><img src=http://evil.example/a.png onerror=x>&amp;\u202e\x1b[31m'
)


class Page(HTMLParser):
    """A page as a browser reads it: elements that all close, their attributes, the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def test_every_number_of_every_table_is_on_the_page() -> None:
    page = Page(html(evidence()))
    for grid in (candidates(evidence().selection), prefixes(evidence()), provenance(evidence())):
        assert grid.rows
        for cell in (cell for row in grid.rows for cell in row):
            assert cell in page.text


def test_every_candidate_has_its_figures_in_one_row() -> None:
    source = html(evidence())
    for found in evidence().selection.cues:
        row = next(
            r for r in source.split("<tr") if f'scope="row" class="words"><span>{found.cue}<' in r
        )
        for fact in (str(found.count), str(found.traces), f"{found.tokens:.1f}"):
            assert f">{fact}<" in row
        assert f"{found.compared.mean:.3f}" in row
        assert f"{found.compared.low:+.3f} to {found.compared.high:+.3f}" in row
        told = "&lt;0.001" if found.corrected < 0.001 else f"{found.corrected:.3f}"
        assert told in row
        assert (">yes<" if found.chosen else found.why) in row


def test_the_summary_says_what_to_expect() -> None:
    found, text = evidence(), Page(html(evidence())).text
    replayed = found.expected.replayed
    assert found.cues and found.expected.cues == found.cues
    assert f"{len(found.cues)} of {len(found.selection.cues)} candidate cues are chosen" in text
    assert f"the large one {100 * replayed.large_share:.1f} %" in text
    assert f"In {100 * replayed.quality:.1f} % of the traces" in text
    assert f"{replayed.speed_up(found.speeds):.2f} at 6.0 ms a handoff" in text
    assert f"costs {replayed.break_even_ms(found.speeds):.1f} ms (break-even)" in text
    assert visible(found.policy, keep="\n") in text


def test_it_loads_and_runs_nothing() -> None:
    page = Page(html(evidence()))
    assert not page.tags("script") and not page.tags("link") and not page.tags("img")
    for _, attributes in page.elements:
        assert not {"src", "href", "xlink:href", "onload", "style"} & set(attributes)
    assert "url(" not in html(evidence()) and "@import" not in html(evidence())
    policies = [a["content"] for a in page.tags("meta") if "http-equiv" in a]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_tables_and_pictures_can_be_read_aloud() -> None:
    page = Page(html(evidence()))
    assert len(page.tags("caption")) == len(page.tags("table")) == 3
    assert all(cell.get("scope") in ("col", "row") for cell in page.tags("th"))
    assert len(page.tags("svg")) == 3 + len(evidence().examples)
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in page.tags("svg"))


def test_hostile_text_is_only_text() -> None:
    odd = by_hand(statistic(_HOSTILE, hides=(_HOSTILE,)), texts=["Thus", _HOSTILE, "\ud800\0."])
    scored = odd.examples[0].scored
    trace = replace(scored.trace, id=_HOSTILE, question=_HOSTILE)
    odd = replace(
        odd,
        examples=(replace(odd.examples[0], scored=Scored(trace, scored.score)),),
        provenance={_HOSTILE: _HOSTILE},
        policy=_HOSTILE,
        title=_HOSTILE,
    )
    source = html(odd)
    page = Page(source)
    assert not page.tags("script") and not page.tags("img")
    assert page.text.count('<script>alert("x")</script>') >= 6
    assert not {"\x1b", "\u202e", "\0"} & set(source)
    assert r"\x1b[31m" in page.text
    source.encode()  # no lone surrogate is left


def test_no_chosen_cue() -> None:
    text = Page(html(by_hand(statistic("Wait", chosen=False)))).text
    assert "0 of 1 candidate cues are chosen: with none, the large model" in text
    assert "no: too often wrong (below 0.95)" in text


def test_nothing_at_all() -> None:
    nothing = replace(by_hand(), prefixes=(), examples=(), provenance={}, policy="")
    text = Page(html(nothing)).text
    assert "0 of 0 candidate cues" in text and "Nothing is handed over" in text


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        (Speeds(5.0, 9.0, 1.0), "The small model is not the faster one"),
        (Speeds(float("nan"), 9.0), "relaying gains nothing is unknown"),
        (Speeds(90.0, 9.0, 1.0), "→"),  # the break-even is right of the picture
    ],
)
def test_odd_speeds(speeds: Speeds, said: str) -> None:
    assert said in Page(html(replace(by_hand(statistic("Thus")), speeds=speeds))).text


def test_unknown_intervals_are_said_to_be_unknown() -> None:
    source = html(by_hand(statistic("Oh", chosen=False, known=False), statistic("Thus")))
    assert "n/a" in Page(source).text
    assert "nan" not in source.replace("Provenance", "")


def test_unknown_margins() -> None:
    odd = by_hand(statistic("Thus"))
    scored = odd.examples[0].scored
    blind = replace(scored.score, margins=(None,) * 4, hits=(None,) * 4)
    odd = replace(odd, examples=(Example(Scored(scored.trace, blind), odd.examples[0].roles),))
    assert [block.mean for block in blocks(odd.examples[0], odd)] == [None, None]
    Page(html(odd))


def test_cues_of_unspaced_scripts() -> None:
    text = Page(html(by_hand(statistic("因此"), texts=["因此", "，", "对", "。"]))).text
    assert "“因此”" in text or "因此" in text
    assert width("因此") == 4 and cut("因此我们", 5) == "因此…"


def test_a_very_long_trace_keeps_the_page_small() -> None:
    count = 10_000
    long = by_hand(statistic("Thus"), texts=[" Thus", *[" word"] * 8, "."] * (count // 10))
    scored = long.examples[0].scored
    margins = tuple((i * 7919 % 1000) / 1000 for i in range(count))
    scored = Scored(scored.trace, replace(scored.score, margins=margins))
    runs = tuple(
        (role, span)
        for start in range(0, count, 10)
        for role, span in (
            (Role.LARGE, Span(start, start + 1)),
            (Role.SMALL, Span(start + 1, start + 10)),
        )
    )
    examples = (Example(scored, runs),) * 3
    source = html(replace(long, examples=examples))
    assert len(source.encode()) < 2_000_000
    assert "and 8,500 tokens more" in Page(source).text


def test_a_handoff_without_a_cue_has_no_mark() -> None:
    found = by_hand(statistic("Thus"), texts=["</think>", "It", " is", "."])
    assert [block.cue for block in blocks(found.examples[0], found)] == ["", ""]
    found = by_hand(statistic("Thus"), statistic("hus"), texts=[" Thus", " it", " is", "."])
    assert [block.cue for block in blocks(found.examples[0], found)] == ["Thus", ""]


def test_a_segment_that_the_scorer_would_leave_is_marked() -> None:
    found = by_hand(statistic("Thus"))
    scored = found.examples[0].scored
    score = replace(scored.score, hits=(True, True, False, True))
    example = Example(Scored(scored.trace, score), found.examples[0].roles)
    assert [block.wrong for block in blocks(example, found)] == [False, True]
    source = html(replace(found, examples=(example,)))
    assert "goes wrong" in source and 'class="wrong"' in source


def test_an_answer_is_not_marked_where_the_scorer_would_leave_it() -> None:
    found = by_hand(statistic("Thus"), texts=[" Thus", " so", "</think>", "It", "."])
    scored = found.examples[0].scored
    score = replace(scored.score, hits=(True, True, True, False, False))
    runs = ((Role.LARGE, Span(0, 1)), (Role.SMALL, Span(1, 5)))
    example = Example(Scored(scored.trace, score), runs)
    assert not any(block.wrong for block in blocks(example, found))


def test_very_many_cues_are_all_in_the_table_and_the_chosen_in_the_picture() -> None:
    many = [statistic(f"word{i}", chosen=i % 20 == 19) for i in range(200)]
    found = by_hand(*many)
    shown = bars(found.selection)
    assert len(shown) == MAX_BARS and sum(cue.chosen for cue in shown) == 10
    text = Page(html(found)).text
    assert all(f"word{i}" in text for i in range(200)) and "140 more are in the table" in text


def test_ticks_are_round_and_within() -> None:
    assert ticks(0, 50) == [0, 10, 20, 30, 40, 50]
    assert ticks(1, 1) == [1]
    assert all(0.97 <= tick <= 1.17 for tick in ticks(0.97, 1.17))
    assert Scale(3, 3, 10, 20).at(3) == 10


def test_the_files_are_written_into_a_new_folder(tmp_path: Path) -> None:
    paths = write_report(by_hand(statistic("Thus")), tmp_path / "new" / "report")
    assert [path.name for path in paths] == [
        "report.html", "cues.png", "share.png", "speed.png", "trace-1.png",
    ]  # fmt: skip
    Page(paths[0].read_text(encoding="utf-8"))
