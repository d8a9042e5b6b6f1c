"""Match module paths against patterns from adapter files, in time linear in the path.

Python's `re` takes exponential time for some patterns (`(a+)+`); the automaton of llguidance used
here does not, and supports neither look-around nor references to groups.
"""

from __future__ import annotations

MOST_CHARACTERS = 1024


class ModulePattern:
    """A pattern of PEFT's `rank_pattern`: it matches the end of a path, from a dot on.

    Raises ValueError with the reason for an invalid one.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"it is longer than {MOST_CHARACTERS} characters")
        # Not above: images with a GPU lack it, and most fleets have no such pattern.
        from llguidance import LLMatcher, LLTokenizer

        # PEFT matches `(.*\.)?(text)$` by `re.match`: with an anchor, that is the whole path.
        whole = text.startswith("^") and "|" not in text
        if "|" not in text:
            text = text.removeprefix("^").removesuffix("$")
        pattern = f"({text})" if whole else rf"(.*\.)?({text})"
        self._matcher = LLMatcher(
            LLTokenizer("byte"), LLMatcher.grammar_from_regex(pattern), log_level=0
        )
        if self._matcher.is_error():
            why = str(self._matcher.get_error()).partition("; ")[0]
            raise ValueError(" ".join(why.split())[:300])

    def matches(self, path: str) -> bool:
        """Whether the pattern matches a module's path."""
        self._matcher.reset()
        tokens = list(path.encode())
        return bool(
            self._matcher.try_consume_tokens(tokens) == len(tokens) and self._matcher.is_accepting()
        )
