import pytest

from envs.exact_match import exact_match, last_answer, normalise_answer, substring_match


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("The  Beatles!", "beatles"),
        ("a cat and an owl", "cat and owl"),
        ("Theodore", "theodore"),  # an article is a word
        ("U.S.A.", "usa"),
        ("the-end", "theend"),  # punctuation goes first, so this is one word
        ("“quotes”", "“quotes”"),  # ASCII punctuation only
        ("14 December, 1972\tUTC\n", "14 december 1972 utc"),
        ("$1,000.50", "100050"),
        ("The", ""),
        ("", ""),
        ("İ", "i̇"),
    ],
)
def test_normalisation_by_hand(text: str, normalised: str):
    assert normalise_answer(text) == normalised


@pytest.mark.parametrize(
    ("prediction", "golden", "exact", "substring"),
    [
        (" the Beatles. ", ["Beatles"], True, True),
        ("Beatles", ["Rolling Stones", "The Beatles"], True, True),
        ("It was the Beatles", ["Beatles"], False, True),
        ("Beat", ["Beatles"], False, False),
        ("", ["Beatles"], False, False),
        ("the", ["a"], True, True),  # both are nothing: equal, as in the source
        ("December 1972", ["14 December 1972 UTC", "December 1972"], True, True),
        ("anything", [], False, False),
    ],
)
def test_matches_by_hand(prediction: str, golden: list[str], exact: bool, substring: bool):
    assert exact_match(prediction, golden) is exact
    assert substring_match(prediction, golden) is substring


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> Oslo </answer>", "Oslo"),
        ("<answer>a</answer> no, <answer>\nb\n</answer>", "b"),
        ("<answer></answer>", ""),
        ("<answer>open", None),
        ("</answer><answer>", None),
        ("<answer><answer>x</answer>", "<answer>x"),
        ("Oslo", None),
    ],
)
def test_the_last_answer_counts(text: str, answer: str | None):
    assert last_answer(text) == answer
