"""Which plan a cell keeps, from the rounds of its last timing."""

from __future__ import annotations

from flashnorm_triton.plans import UNFUSED, Plan
from flashnorm_triton.tuning import tuner
from flashnorm_triton.tuning.measure import timing

HEURISTIC = Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 6)
FAST = Plan("single_pass", "hopper_swap", 16, 64, 128, 4, 6, in_flight=1)


def test_a_winner_in_the_median_alone_is_no_clear_winner():
    """A bimodal clock: ahead by 4 % in the median, behind in every third round."""
    lucky = timing([9.6, 9.6, 11.0] * 7)
    steady = timing([10.0] * 21)
    unfused = timing([12.0] * 21)
    assert tuner.decide({FAST: lucky, HEURISTIC: steady, UNFUSED: unfused}, HEURISTIC) == HEURISTIC
    ahead = timing([9.6, 9.6, 9.9] * 7)
    assert tuner.decide({FAST: ahead, HEURISTIC: steady, UNFUSED: unfused}, HEURISTIC) == FAST


def test_what_is_slower_than_unfused_in_its_own_median_goes():
    """A clock that jumps within rounds: round by round level, yet 7 % apart in the medians."""
    heuristic = timing([10.0, 10.7, 10.7, 10.0, 10.7])
    unfused = timing([10.0, 10.0, 10.7, 10.7, 10.0])
    assert tuner.decide({HEURISTIC: heuristic, UNFUSED: unfused}, HEURISTIC) == UNFUSED
