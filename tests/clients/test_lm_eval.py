"""lm-evaluation-harness measures through the gateway what our own comparison measures."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.demo.ask import Target
from gateway.demo.compare import Plan, compare
from gateway.demo.problems import problems
from tests.clients.support import POLICY, Running, environment, program

pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="session")]

COUNT, SEED, MAX_TOKENS = 20, 31, 1024
TASK = "arithmetic_in_words"


@pytest.mark.timeout(300)
async def test_the_harness_and_our_comparison_grade_every_problem_alike(
    tmp_path: Path, running: Running
) -> None:
    accuracy, samples = await _evaluated(tmp_path, running)
    expected = await _compared(running)
    assert [sample["exact_match"] == 1 for sample in samples] == expected
    assert accuracy == pytest.approx(sum(expected) / COUNT)
    assert accuracy > 0.5


async def _compared(running: Running) -> list[bool]:
    """By problem, whether the relay is right."""
    plan = Plan(
        large=Target(f"{running.large}/v1", "tiny-large"),
        small=Target(f"{running.small}/v1", "tiny-small"),
        relay=Target(f"{running.url}/v1", POLICY),
        count=COUNT,
        seed=SEED,
        max_tokens=MAX_TOKENS,
    )
    return [graded.right["relay"] for graded in (await compare(plan)).graded]


async def _evaluated(folder: Path, running: Running) -> tuple[float, list[dict[str, Any]]]:
    """The harness's accuracy and its samples, in the problems' order."""
    _write_task(folder / "tasks")
    url = f"{running.url}/v1/chat/completions"
    given = f"base_url={url},model={POLICY},num_concurrent=1,max_retries=1"
    process = await asyncio.create_subprocess_exec(
        str(program("lm_eval")), "run", "--model", "local-chat-completions", "--model_args", given,
        "--include_path", str(folder / "tasks"), "--tasks", TASK, "--apply_chat_template",
        "--output_path", str(folder / "out"), "--log_samples",
        cwd=folder, env=environment(HF_HOME=str(folder / "hf")), stdout=PIPE, stderr=STDOUT,
    )  # fmt: skip
    try:
        told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, told.decode()[-4000:]
    [results] = (folder / "out").rglob("results_*.json")
    [lines] = (folder / "out").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in lines.read_text().splitlines()]
    accuracy = json.loads(results.read_text())["results"][TASK]["exact_match,last-integer"]
    return accuracy, sorted(samples, key=lambda sample: sample["doc_id"])


def _write_task(folder: Path) -> None:
    folder.mkdir()
    lines = [
        json.dumps({"question": problem.question, "answer": str(problem.expected)})
        for problem in problems(COUNT, SEED)
    ]
    (folder / "problems.jsonl").write_text("\n".join(lines))
    (folder / "task.yaml").write_text(yaml.safe_dump(_task(folder / "problems.jsonl")))


def _task(problems: Path) -> dict[str, Any]:
    """Asks, samples and grades as gateway.demo does: the last integer of the answer counts."""
    last_integer = {"function": "regex", "regex_pattern": r"(-?\d+)", "group_select": -1}
    return {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(problems)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "temperature": 0, "max_gen_toks": MAX_TOKENS},
        "filter_list": [
            {"name": "last-integer", "filter": [last_integer, {"function": "take_first"}]}
        ],
        "metric_list": [{"metric": "exact_match"}],
    }
