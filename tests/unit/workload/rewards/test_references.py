"""References of rows, in the form that math-verify reads."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from grpo_workload.rewards.references import boxed, read, read_row

LONG = "Add 3 to both of the sides, then divide them by 2, which gives 7."


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (r"3\sqrt{7}", [r"\boxed{3\sqrt{7}}"]),
        ("(2,9)", [r"\boxed{(2,9)}"]),
        ("$14$,$25$", [r"\boxed{14,25}"]),
        (r"$(-\infty, 2)$.", [r"\boxed{(-\infty, 2)}"]),
        (r"\(\frac{3}{8}\)", [r"\boxed{\frac{3}{8}}"]),
        (r"\$31.40", [r"\boxed{\$31.40}"]),
        (r"6.5 \text{ miles per hour}", [r"\boxed{6.5 \text{ miles per hour}}"]),
        ("north", [r"\boxed{north}"]),
        ("no solution", [r"\boxed{no solution}"]),
        ("61 boxes of tea", [r"\boxed{61}"]),  # math-verify would multiply by letters
        ("+3 cm.", [r"\boxed{+3}"]),
        ("5 hours and 30 minutes", []),
        ("3 dozen", []),
        ("between 3 and 5", []),
        ("2ab + 3bc", [r"\boxed{2ab + 3bc}"]),
        ("S_{ABC} = 2 S_{DEF}", [r"\boxed{S_{ABC} = 2 S_{DEF}}"]),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", [r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}"]),
        ("sin 30 + max(1, 2)", [r"\boxed{sin 30 + max(1, 2)}"]),
        ("Answer: 1/2", [r"\boxed{1/2}"]),
        ("#### Step 1\nAdd.\n#### Step 2\nDivide\nby 2.", []),
        (r"$x = \boxed{3}$, $y = \boxed{4}$", [r"\boxed{3, 4}"]),
        (r"so \boxed{}", []),
        ("7 pi", [r"\boxed{7 pi}"]),
        ("She has 4 - 1 = 3 left.\n#### 1,203", [r"\boxed{1,203}"]),
        (r"Hence $x = 4$, so \boxed{\frac{9}{\sqrt{2}}} is the area; as $E_2$ shows.", [r"\boxed{\frac{9}{\sqrt{2}}}"]),
        (r"first \boxed{1}; in the end $\boxed{3}$ and $\boxed{\{4\}}$", [r"\boxed{3, \{4\}}"]),
        (r"\fbox{8}", [r"\boxed{8}"]),
        (r"The area is $12$ square feet.", [r"The area is $12$ square feet."]),
        (r"The answer is 5\sqrt{2}.", [r"\boxed{5\sqrt{2}}"]),
        (r"Both sides add up to 5\sqrt{2}.", []),  # math-verify would read 2
        ("Take the integral over the whole of the real line", []),
        ("It took 12 of them, 3 more than before, so the rest were 9", None),
        (17, [r"\boxed{17}"]),
        (3159.0, [r"\boxed{3159}"]),
        (1e-7, [r"\boxed{0.0000001}"]),
        (2e21, [r"\boxed{2000000000000000000000}"]),
        (np.float16(0.1), [r"\boxed{0.1}"]),
        (np.array(5), [r"\boxed{5}"]),
        (Decimal("1.50"), [r"\boxed{1.50}"]),
        (Fraction(3, 4), [r"\boxed{3/4}"]),
        pytest.param(10**5000, [], id="huge"),
        (True, [r"\boxed{True}"]),
        (["12", 13, ""], [r"\boxed{12}", r"\boxed{13}"]),
        (np.array([1.5, 2.0]), [r"\boxed{1.5}", r"\boxed{2}"]),
        *((none, []) for none in ("", "  ", None, math.nan, math.inf, b"12", {"answer": 12}, [], [None], r"\boxed{3")),
    ],
)
def test_what_a_column_states(value, texts):
    assert read(value) == tuple([value] if texts is None else texts)


@pytest.mark.parametrize(
    ("columns", "texts"),
    [
        ({"answer": ["2", "5"]}, [r"\boxed{2}", r"\boxed{5}"]),
        ({"answer": ["2", "$5$"], "is_multiple_answer": True}, [r"\boxed{2, 5}"]),
        ({"answer": ["2,5"], "is_multiple_answer": True}, [r"\boxed{2,5}"]),
        ({"solution": "", "answer": "7"}, [r"\boxed{7}"]),
        ({"solution": None, "answer": "7"}, [r"\boxed{7}"]),
        ({"solution": r"so \boxed{8}", "answer": "7"}, [r"\boxed{8}"]),
        ({"solution": "8", "answer": "7"}, [r"\boxed{8}"]),
        ({"solution": "Add 3 to both, then divide by 2.", "answer": "7"}, [r"\boxed{7}"]),
        ({"solution": LONG, "answer": ""}, [LONG]),
        ({"solution": [LONG, "3"], "answer": "7"}, [r"\boxed{7}"]),
        ({"solution": "x + 3 = 10\nx = 7", "answer": "7"}, [r"\boxed{7}"]),
        ({"solution": "See above", "answer": "7"}, [r"\boxed{7}"]),
        ({"answer": ["2", "5"], "is_multiple_answer": "true"}, [r"\boxed{2, 5}"]),
        ({"question": "2 + 5?"}, []),
    ],
)
def test_which_column_of_a_row_counts(columns, texts):
    assert read_row(columns) == tuple(texts)


@pytest.mark.parametrize(("text", "contents"), [(r"\boxed{a{b}c} \boxed {d} \boxed{e", ["a{b}c", "d"]), ("", [])])
def test_boxes(text, contents):
    assert [content for content, _, _ in boxed(text)] == contents


@pytest.mark.parametrize(
    "text",
    [
        "The answer is" + " " * 1_000_000 + "x\n" * 30_000,
        r"\boxed{1}" + " " * 1_000_000 + r"\boxed{2}",
        r"\boxed{ " * 200_000,
        "answer is " * 200_000,
        "$" * 500_000,
        "1 a " * 250_000,
    ],
)
@pytest.mark.timeout(60)  # each takes less than a second, and minutes to hours with the square of its length
def test_no_text_takes_long(text):
    """It is read in the rank, where nothing ends it."""
    read(text)
