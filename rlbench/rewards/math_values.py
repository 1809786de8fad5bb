"""What math-verify calls equal, looked at again: it rounds to decimal places, takes letters for factors and reads of an
equation its last side alone.

Numbers have to agree in their significant digits however small they are, letter strings in their order, and an equation
that is answered to a number has to be true.
"""

from __future__ import annotations

import re
from typing import Any

EXACT_DIGITS = 15
"""Significant digits in which numbers without a decimal point have to agree."""
WORKING_DIGITS = 30
PLACES = ((3, 7), (5, 11), (2, 13))
"""Where expressions with variables are compared: numerators and denominators of what the first variable is."""
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit|mathit|operatorname|boxed|textrm|rm)\b\s*|[\s{}$]")
_LETTERS = re.compile(r"[A-Za-z]{2,}")


def letters(text: str) -> str | None:
    """Give a text that is a string of letters (`ABC`, an ordering or a word) without its markup; None for another.

    Two or three small letters in the order of the alphabet are a product (`xy`), not a word.
    """
    plain = _WRAPPED.sub("", text)
    if not _LETTERS.fullmatch(plain) or "\\" in plain:
        return None
    return None if plain.islower() and len(plain) <= 3 and "".join(sorted(plain)) == plain else plain


def agree(label: Any, answer: Any, digits: int) -> bool:
    """Whether a label and an answer, which math-verify calls equal, are so in size; what is no number is let be."""
    from sympy import FiniteSet, Interval, MatrixBase, Tuple

    label_sides, answer_sides = _sides(label), _sides(answer)
    if answer_sides and not label_sides and not _true_of_numbers(answer_sides, digits):
        return False
    if label_sides or answer_sides:
        if label_sides and answer_sides and label_sides[0] != answer_sides[0]:
            return True  # two equations, solved or rearranged by math-verify
        one, other = label_sides[-1] if label_sides else label, answer_sides[-1] if answer_sides else answer
        return agree(one, other, digits)
    if isinstance(label, FiniteSet) and isinstance(answer, FiniteSet):
        return all(any(agree(one, other, digits) for other in answer.args) for one in label.args)
    if isinstance(label, Tuple | Interval) and isinstance(answer, Tuple | Interval):
        pairs = zip(label.args[:2] if isinstance(label, Interval) else label.args, answer.args, strict=False)
        return all(agree(one, other, digits) for one, other in pairs)
    if isinstance(label, MatrixBase) and isinstance(answer, MatrixBase):
        return all(agree(one, other, digits) for one, other in zip(label.flat(), answer.flat(), strict=False))
    return _expressions_agree(label, answer, digits)


def _sides(value: Any) -> list[Any]:
    """The sides of an equation or of a chain of them; none of anything else."""
    from sympy import And, Eq

    parts = value.args if isinstance(value, And) else (value,)
    if not all(isinstance(part, Eq) for part in parts):
        return []
    return [parts[0].lhs, *(part.rhs for part in parts)]


def _true_of_numbers(sides: list[Any], digits: int) -> bool:
    """Whether those sides of an equation that are numbers are one number."""
    numbers = [side for side in sides if getattr(side, "is_number", False)]
    return all(_numbers_agree(numbers[0], other, digits) for other in numbers[1:])


def _expressions_agree(label: Any, answer: Any, digits: int) -> bool:
    from sympy import Expr, Rational

    if not isinstance(label, Expr) or not isinstance(answer, Expr):
        return True
    variables = sorted(label.free_symbols | answer.free_symbols, key=str)
    if not variables:
        return _numbers_agree(label, answer, digits)
    for numerator, denominator in PLACES:
        place = {name: Rational(numerator + 2 * i, denominator + i) for i, name in enumerate(variables)}
        one, other = label.subs(place), answer.subs(place)
        if not (one.is_number and other.is_number) or _numbers_agree(one, other, digits):
            return True
    return False


def _numbers_agree(label: Any, answer: Any, digits: int) -> bool:
    """Whether two numbers do, of percentages either the share or what stands before the sign."""
    return any(_close(one, other, digits) for one in _readings(label) for other in _readings(answer))


def _readings(number: Any) -> list[Any]:
    from sympy import Mul, Rational

    percent = isinstance(number, Mul) and len(number.args) == 2 and Rational(1, 100) in number.args
    return [number, number * 100] if percent else [number]


def _close(label: Any, answer: Any, digits: int) -> bool:
    from sympy import Float, Rational, simplify

    one, other = label.evalf(WORKING_DIGITS), answer.evalf(WORKING_DIGITS)
    if not (one.is_finite and other.is_finite):
        return True  # infinities and what has no value are math-verify's to compare
    decimal = label.has(Float) or answer.has(Float)
    largest = max(abs(one), abs(other))
    if abs(one - other) <= largest * Rational(5, 10 ** (digits if decimal else EXACT_DIGITS)):  # half of the last digit
        return True
    return not decimal and simplify(label - answer) == 0
