"""Mathematical answers, compared as mathematics (math-verify on sympy) in processes that can be killed."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlbench.errors import DataError
from rlbench.rewards.kinds import Board, By, Failure, Outcome, Reward, Scorer, part, read, shown
from rlbench.rewards.lanes import Lost, answers
from rlbench.rewards.math_values import agree, letters
from rlbench.user_code import user_code

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout

_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
PARSED, TIMEOUT = "math/parsed", "math/timeout"
WALL = 10
"""Wall clock a comparison may take, in its seconds of CPU: on a busy machine it does not get a core all the time."""
ON_LABEL, ON_ANSWER = signal.SIGVTALRM, signal.SIGPROF
"""What ends a process whose CPU time is over: it also says at what."""
_TIMERS = {ON_LABEL: signal.ITIMER_VIRTUAL, ON_ANSWER: signal.ITIMER_PROF}


@dataclass(frozen=True, repr=False)
class math(Scorer):
    r"""1.0 where the completion's answer equals the label as mathematics, 0.0 where not.

    The answer is the last `\boxed{…}` of the policy's last turn, else what math-verify finds there (LaTeX between
    dollars, a number). A label of GSM8K's form counts from its last `####` on. Components: `math/parsed` 1.0 where an
    answer was found, `math/timeout` 1.0 where comparing it took too much time or memory; the reward is 0.0 then. A
    completion has an error for what is not its answer's fault: a label that is missing, no mathematics or too costly, a
    process that died.

    Args:
        label: None for the prompt's label, the name of a key of its `meta`, or a function of the rollout.
        inside: look inside the last `<inside>…</inside>` alone.
        timeout_s: seconds of CPU time for one completion, so that a busy machine makes no right answer wrong.
        memory_gib: GiB each process may take for it.
        processes: at a time; None for one per core, four at most. They start anew with each scoring, in about a second.
        digits: significant digits, and decimal places, in which a number with a decimal point has to agree; numbers
            without one are exact.
    """

    label: By = None
    _: KW_ONLY
    inside: str | None = None
    timeout_s: float = 5.0
    memory_gib: float = 2.0
    processes: int | None = None
    digits: int = 6

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or not self.memory_gib > 0:
            raise DataError("math: timeout_s and memory_gib are above 0")

    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        """Compare all of them; see `Scorer.score_all`."""
        if importlib.util.find_spec("math_verify") is None:
            raise DataError("rb.rewards.math needs math-verify: pip install math-verify")
        asked: list[tuple[int, tuple[str, str]]] = []
        for i, rollout in enumerate(rollouts):
            try:
                with user_code():
                    wanted, text = read(rollout, self.label), part(rollout.answer, self.inside)
            except Exception as error:  # a user's own function of the rollout, too
                board.put(i, Failure.of(error), 0.0)
                continue
            if text is None:
                board.put(i, _wrong(), 0.0)
            else:
                asked.append((i, (str(wanted), text)))
        pairs = (pair for _, pair in asked)
        job, wall_s = Comparison(self.digits, self.timeout_s), WALL * self.timeout_s
        found = answers(job, pairs, len(asked), self.processes, wall_s, self.memory_gib, board.check)
        with contextlib.closing(found):
            for k, answer, seconds in found:
                i, (wanted, _) = asked[k]
                board.put(i, _outcome(answer, wanted, self.timeout_s), seconds)

    def answer(self, rollout: Rollout) -> str | None:
        r"""Return what a scored completion answers, as `majority_at` counts votes; None for nothing.

        Right ones answer the label, whatever their form; of a wrong one counts the text in its last `\boxed{…}`, else
        its last number.
        """
        if rollout.reward == 1.0:
            return _plain(_label(str(read(rollout, self.label))))
        text = _without_dollars(part(rollout.answer, self.inside) or "")
        said = last_boxed(text) or next(iter(_NUMBER.findall(text)[-1:]), None)
        return None if said is None else _plain(said)

    def __repr__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if v != getattr(type(self), k)}
        return shown("math", **changed)


@dataclass(frozen=True)
class Comparison:
    """What runs in the processes: (label, completion) -> whether an answer was found, and equals the label.

    The label comes first, with a limit of its own: what it costs or raises is no fault of the answer's.
    """

    digits: int
    cpu_s: float

    def prepare(self) -> None:
        """Import sympy before the clock runs."""
        logging.disable(logging.WARNING)  # math-verify warns that nobody ends it; we do
        for ending in _TIMERS:  # a parent may have blocked or ignored them
            signal.signal(ending, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TIMERS)
        self._compared(_gold("1", self.digits), "$\\frac{2}{2}$")

    def __call__(self, pair: tuple[str, str]) -> dict[str, Any]:
        wanted, text = pair
        try:
            with _cpu_limit(ON_LABEL, self.cpu_s):
                gold = _gold(wanted, self.digits)
        except Exception as error:  # told as the label's
            return {"label": f"cannot be computed ({type(error).__name__}: {str(error)[:80]})"}
        if not _meant(gold):
            return {"label": "holds no mathematics"}
        try:
            with _cpu_limit(ON_ANSWER, self.cpu_s):
                return self._compared(gold, text)
        except MemoryError:
            return {"parsed": False, "equal": False, "memory": True}
        except Exception:  # an answer that sympy chokes on, as by its depth, is a wrong one
            return {"parsed": False, "equal": False}

    def _compared(self, gold: list[Any], text: str) -> dict[str, Any]:
        from math_verify import parse

        answer = parse(_without_dollars(last_boxed(text) or text), parsing_timeout=None)
        words = [next((letters(one) for one in side if isinstance(one, str)), None) for side in (gold, answer)]
        if None not in words:
            return {"parsed": True, "equal": words[0] == words[1]}
        return {"parsed": bool(answer), "equal": any(self._equal(one, other) for one in gold for other in answer)}

    def _equal(self, label: Any, answer: Any) -> bool:
        """Whether math-verify calls one reading of the label and one of the answer equal, and they agree in size."""
        from math_verify import verify

        equal = verify(label, answer, float_rounding=self.digits, timeout_seconds=None)
        return bool(equal) and (isinstance(label, str) or agree(label, answer, self.digits))


@lru_cache(maxsize=64)
def _gold(wanted: str, digits: int) -> list[Any]:
    """The label as mathematics, compared once with something else: sympy computes only then."""
    from math_verify import parse, verify

    label = _label(wanted)
    latex = label if "$" in label or "\\boxed" in label else f"\\boxed{{{label}}}"  # found for sure
    gold = list(parse(latex, parsing_timeout=None))
    if _meant(gold):
        verify(gold, parse("$\\frac{1}{3}$", parsing_timeout=None), float_rounding=digits, timeout_seconds=None)
    return gold


@contextlib.contextmanager
def _cpu_limit(ending: signal.Signals, seconds: float) -> Iterator[None]:
    """Let the kernel end this process when it has used so much CPU time: sympy heeds nothing less."""
    signal.setitimer(_TIMERS[ending], seconds)
    try:
        yield
    finally:
        signal.setitimer(_TIMERS[ending], 0.0)


def _label(wanted: str) -> str:
    """The answer in a label: of a worked one, what stands behind GSM8K's `####`, and of that MATH's last box.

    A sign of dollars before a number is none of mathematics.
    """
    end = _without_dollars(wanted.rpartition("####")[2].strip())
    if end.count("$") % 2:
        end = end.replace("$", "")
    return last_boxed(end) or end


def _without_dollars(text: str) -> str:
    r"""A text without the `\$` of amounts in dollars."""
    return text.replace("\\$", "")


def _plain(answer: str) -> str:
    """An answer without its box, spaces, dollars and the commas of thousands."""
    inner = answer.partition("{")[2].rpartition("}")[0] if answer.startswith("\\boxed") else answer
    return re.sub(r"[\s$]|,(?=\d{3}\b)", "", inner)


def last_boxed(text: str) -> str | None:
    r"""The last whole `\boxed{…}` of a text; None where there is none. math-verify would take several as a list."""
    opened: list[int | None] = []  # where the boxes began that are still open; None for another brace
    found = None
    for mark in _BRACES.finditer(text):
        if mark[0].startswith("\\boxed"):
            opened.append(mark.start())
        elif mark[0] == "{":
            opened.append(None)
        elif mark[0] == "}" and opened and (begin := opened.pop()) is not None:
            found = text[begin : mark.end()]
    return found


def _meant(gold: list[Any]) -> bool:
    """Whether there is anything to compare with; a text that sympy could not read is compared as text."""
    return bool(gold) and any(str(g).strip() for g in gold)


def _outcome(answer: Any, wanted: str, cpu_s: float) -> Outcome:
    label = f"math: the label {wanted[:60]!r}"
    if isinstance(answer, Lost):
        if answer.signal == ON_ANSWER:
            return _wrong(timeout=1.0)
        if answer.signal == ON_LABEL:
            return Failure(f"{label} takes more than {cpu_s:g} s of CPU time by itself", "wanted one that is computed")
        hint = "the machine is busy: score again, or give fewer processes=" if answer.timeout else ""
        return Failure(f"math: the comparison {answer.said}", hint)
    if "label" in answer:
        return Failure(f"{label} {answer['label']}", "wanted a number or LaTeX")
    if answer.get("memory"):
        return _wrong(timeout=1.0)
    return Reward(float(answer["equal"]), {PARSED: float(answer["parsed"]), TIMEOUT: 0.0})


def _wrong(timeout: float = 0.0) -> Reward:
    return Reward(0.0, {PARSED: 0.0, TIMEOUT: timeout})
