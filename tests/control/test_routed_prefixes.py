"""What is remembered of prompts, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ballast.control.routed_prefixes import RoutedPrefixes

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def shared(a: list[int], b: list[int], block: int) -> int:
    """Tokens of `a`, in whole blocks and without its last, that `b` begins with too."""
    full = min(len(a) - 1, len(b) - 1) // block
    same = 0
    while same < full and a[: (same + 1) * block] == b[: (same + 1) * block]:
        same += 1
    return same * block


@given(st.lists(st.tuples(PROMPTS, st.sampled_from("xy")), max_size=12), PROMPTS)
def test_the_longest_beginning_that_was_given_under_the_same_salt_is_known(
    prompts: list[tuple[list[int], str]], asked: list[int]
) -> None:
    held = RoutedPrefixes("model", 2, 1000)
    for prompt, salt in prompts:
        held.add(prompt, salt)
    best = max((shared(asked, prompt, 2) for prompt, salt in prompts if salt == "x"), default=0)
    assert held.tokens(asked, "x") == best


@given(st.lists(PROMPTS, max_size=20), st.integers(0, 6))
def test_no_more_is_kept_than_allowed_and_the_last_prompt_first(
    prompts: list[list[int]], most: int
) -> None:
    held = RoutedPrefixes("model", 2, most)
    for prompt in prompts:
        held.add(prompt, "")
        assert len(held) <= most
        assert held.tokens(prompt, "") == 2 * min(most, (len(prompt) - 1) // 2)
