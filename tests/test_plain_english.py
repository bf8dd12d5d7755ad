"""The check of plain English finds planted sentences, and leaves clean and waived ones alone."""

import plain_english
import pytest


def found_in(source: str) -> list[int]:
    return [each.line for each in plain_english.check_python("planted.py", source)]


@pytest.mark.parametrize(
    "sentence",
    [
        "Return the rows that the actor was told of.",
        "Return the seconds that a step comes to.",
        "Return what lies in the buffer.",
        "Return the prompt alone, if the tokens alone do not fit.",
        "Return the tokens behind the prompt.",
        "Return the reward where there is one.",
    ],
)
def test_planted_phrase_is_found(sentence: str) -> None:
    docstring = f'def f() -> None:\n    """{sentence}"""\n'
    assert set(found_in(docstring)) == {2}
    assert set(found_in(f"x = 1\n# {sentence}\n")) == {2}
    assert set(found_in(f'x = (\n    "{sentence}"\n)\n')) == {2}
    assert {
        each.line for each in plain_english.check_page("page.md", f"# Title\n{sentence}\n")
    } == {2}


@pytest.mark.parametrize(
    ("opening", "kind"),
    [
        ("Of the rows that have ended.", "def f() -> None:"),
        ("The rows that have ended.", "def f() -> None:"),
        ("Raises: ValueError for a row.", "def f() -> None:"),
        ("rows: of the step.", "def f() -> None:"),
        ("What a row has.", "class Row:"),
    ],
)
def test_fragment_that_opens_a_docstring_is_found(opening: str, kind: str) -> None:
    assert found_in(f'{kind}\n    """{opening}"""\n') == [2]


def test_plain_sentences_are_not_found() -> None:
    source = '''
class Row:
    """One row of a batch; it is stored where it was made."""

    @property
    def size(self) -> int:
        """The number of tokens."""

    def is_empty(self) -> bool:
        """Whether there is no token in the row."""

    def add(self, token: int) -> None:
        """Add a token after the last one. `told of` and `for ever` are code here."""
'''
    assert found_in(source) == []
    assert list(plain_english.check_page("page.md", "A page.\n```\nit was told of it\n```\n")) == []


def test_waiver_needs_a_reason() -> None:
    assert found_in("# It was told of it. english: quotes a user\n") == []
    assert found_in("# It was told of it. english:\n") == [1]
    page = "It was told of it. <!-- english: quotes a user -->\n"
    assert list(plain_english.check_page("page.md", page)) == []


def test_few_phrases_are_forbidden() -> None:
    assert len(plain_english.PHRASES) <= 25
