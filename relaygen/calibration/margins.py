"""Probability margins from logprobs, and what is not known of them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def margin(logprobs: Sequence[float]) -> float | None:
    """p(top-1) - p(top-2) of one token position, 0..1, from its logprobs in any order.

    None where it is unknown: fewer than two alternatives. Engines report a "certain" 0.0 with
    nothing beside it for tokens that they did not score (llama.cpp, speculative decoding).
    """
    finite = sorted((lp for lp in logprobs if lp <= 0.0 and not math.isnan(lp)), reverse=True)
    if len(finite) < 2:
        return None
    return math.exp(finite[0]) - math.exp(finite[1])
