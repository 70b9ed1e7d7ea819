import time
from fractions import Fraction

import pytest

from envs.numeric_answer import extract_number, golden_number, numeric_answer

TOO_LONG = "9" * 41


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 9 * 2 = 18.\n#### 18", "18", "18"),
        ("####18", "18", "18"),
        ("#### 18<|im_end|>", "18", "18"),
        ("#### -7", "-7", "-7"),
        ("#### \u22127", "-7", "-7"),  # the minus sign of typography
        ("#### -$7 or $-7", "-7", "-7"),  # the first behind the mark
        ("#### 1,234,567 people.", "1234567", "1234567"),
        ("#### $1,234.50", "2469/2", "2469/2"),
        ("#### \u20ac .5", "1/2", "1/2"),
        ("#### 50% of them", "50", "50"),  # a percent sign is a unit
        ("#### 5kg", "5", "5"),
        ("#### **42**", "42", "42"),
        ("#### 3/4", "3/4", "3/4"),
        ("#### 1 1/2 cups", "3/2", "3/2"),
        ("#### 6 / 8", "3/4", "3/4"),
        ("\\boxed{42}", "42", "42"),
        ("$\\boxed{\\$1{,}000}$", "1000", "1000"),
        ("\\boxed{\\dfrac{3}{4}}", "3/4", "3/4"),
        ("#### \\boxed{42}", "42", "42"),
        ("#### 1\n#### 2", "2", "2"),  # the last one counts ...
        ("\\boxed{1} #### 2", "2", "2"),
        ("#### 2\n####", "2", "2"),  # ... that holds a number
        ("The answer is 42. I used 3 steps.", None, "42"),
        ("Answer: $42.", None, "42"),
        ("16 - 3 - 4 = 9, times 2 is 18.", None, "18"),
        ("10-5", None, "5"),  # a difference, not a number below 0
        ("that leaves -5 degrees", None, "-5"),
        ("#### eighteen, or 18", None, "18"),
        ("#### 1.2.3", None, None),  # what begins like a number and goes on otherwise is none
        ("#### 12x5", None, None),
        ("#### 1e5", None, None),
        ("#### 3,50", None, None),
        ("#### 7:13", None, None),
        ("#### 1/0", None, None),
        ("#### 1/2/3", None, None),
        (f"#### {TOO_LONG}", None, None),
        (f"#### 1/{TOO_LONG}", None, None),
        ("#### \u0664\u0662", None, None),  # other scripts' digits
        ("no number at all", None, None),
        ("", None, None),
    ],
)
def test_numbers_by_hand(text: str, strict: str | None, flexible: str | None):
    assert extract_number(text, mode="strict") == (None if strict is None else Fraction(strict))
    assert extract_number(text, mode="flexible") == (None if flexible is None else Fraction(flexible))


@pytest.mark.parametrize(
    ("completion", "golden", "score"),
    [
        ("#### 18.00", "9 * 2 = <<9*2=18>>18\n#### 18", 1.0),
        ("#### 10,000", "10000", 1.0),
        ("#### 0.75", "3/4", 1.0),
        ("#### 0.3333", "1/3", 0.0),  # exact, not nearly
        ("#### 0.1", ".10", 1.0),
        ("#### 9", "18", 0.0),
        ("18", "18", None),
    ],
)
def test_scores_by_hand(completion: str, golden: str, score: float | None):
    assert numeric_answer(completion, [golden]) == score


def test_one_of_several_golden_answers_is_enough():
    assert numeric_answer("#### 2", ["1", "2"]) == 1.0


def test_flexible_takes_an_unmarked_number():
    assert numeric_answer("it is 18.", ["18"], mode="flexible") == 1.0


@pytest.mark.parametrize("golden", ["eighteen", "", "about 18", TOO_LONG])
def test_a_golden_answer_without_a_number_is_refused(golden: str):
    with pytest.raises(ValueError, match="expected a golden answer that is a number"):
        golden_number(golden)


@pytest.mark.parametrize(
    "piece", ["1", "1,111", "#### ", "#", "-", "$", "1 ", "1 1/", "a1", "1a", "answer is ", "\\frac{1}{", "\\boxed{", "####1", " ", ".,"], ids=repr
)
def test_the_time_is_linear_in_the_text(piece: str):
    """Twenty thousand characters take some milliseconds; were it quadratic anywhere, they would take seconds."""
    text = "#### 1" + piece * (20_000 // len(piece))
    started = time.process_time()
    extract_number(text, mode="flexible")
    assert time.process_time() - started < 0.2
