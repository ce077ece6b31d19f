"""Margins by a plain forward pass, to hold engines against: run with torch and transformers.

    python forward_margins.py MODEL_FOLDER < traces.jsonl

Writes a line for each trace: p(top-1) - p(top-2) at each of its tokens.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    for line in sys.stdin:
        trace = json.loads(line)
        ids = torch.tensor([trace["prompt_ids"] + trace["ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0]
        top = logits.double().softmax(-1).topk(2).values
        margins = (top[:, 0] - top[:, 1]).tolist()
        begin = len(trace["prompt_ids"]) - 1  # what stands at a token tells of the next one
        sys.stdout.write(json.dumps(margins[begin : begin + len(trace["ids"])]) + "\n")


if __name__ == "__main__":
    main()
