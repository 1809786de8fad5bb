"""Rules on what the policy said, never on the prompt or what an environment said: 1.0 where it is as wanted, else 0.0.

Those of an answer (`exact`, `contains`, `regex` with a group) look at the policy's last turn, those of a form (`tags`,
`regex` without one) at all of its turns.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from rlbench.errors import DataError
from rlbench.rewards.kinds import By, part, read, shown

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout


@dataclass(frozen=True, repr=False)
class exact:
    """1.0 where the policy's last turn is the label, white space around both aside; compared as text.

    A list as label is one of right answers, any of which will do; `True` is met by "true", as JSON writes it, too.

    `label`: None for the prompt's label, a key of its `meta`, or a function of the rollout. `inside` compares the text
    inside the last `<inside>…</inside>` alone. `ignore_case` compares by `str.casefold`.
    """

    label: By = None
    _: KW_ONLY
    inside: str | None = None
    ignore_case: bool = False

    def __call__(self, rollout: Rollout) -> float:
        said, wanted = part(rollout.answer, self.inside), label_texts(rollout, self.label)
        return float(said is not None and self._folded(said) in map(self._folded, wanted))

    def _folded(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()

    def __repr__(self) -> str:
        return shown(type(self).__name__, **vars(self))


@dataclass(frozen=True, repr=False)
class contains(exact):
    """1.0 where the label stands somewhere in the policy's last turn; arguments as in `exact`."""

    def __call__(self, rollout: Rollout) -> float:
        wanted = [self._folded(text) for text in label_texts(rollout, self.label)]
        if not all(wanted):
            raise DataError("the label is empty: every completion contains it")
        said = part(rollout.answer, self.inside)
        return float(said is not None and any(text in self._folded(said) for text in wanted))


@dataclass(frozen=True, repr=False)
class regex:
    r"""1.0 where the pattern is found in what the policy said; with `group`, where the last match's group in its last
    turn is the label.

    As in `regex(r"#### (-?\d+)", 1)`; `flags` are `re`'s. A pattern with nested repeats can take for ever on a
    completion made for it: `score(…, isolate=True, timeout_s=1)`.
    """

    pattern: str
    group: int | str | None = None
    label: By = None
    flags: int = 0

    def __post_init__(self) -> None:
        try:
            compiled = re.compile(self.pattern, self.flags)
        except re.error as error:
            raise DataError(f"regex: {self.pattern!r} is no pattern: {error}") from None
        known = {*range(compiled.groups + 1), *compiled.groupindex}
        if self.group is not None and self.group not in known:
            groups = ", ".join(map(repr, sorted(known, key=str)))
            raise DataError(f"regex: {self.pattern!r} has no group {self.group!r}; it has {groups}")
        if self.group is None and self.label is not None:
            raise DataError("regex: label has an effect with group alone, whose text is compared with it")

    def __call__(self, rollout: Rollout) -> float:
        text = rollout.text if self.group is None else rollout.answer
        found = list(re.finditer(self.pattern, text, self.flags))
        if self.group is None:
            return float(bool(found))
        wanted = [label.strip() for label in label_texts(rollout, self.label)]
        return float(bool(found) and (found[-1][self.group] or "").strip() in wanted)

    def __repr__(self) -> str:
        return shown("regex", self.pattern, group=self.group, label=self.label, flags=int(self.flags) or None)


@dataclass(frozen=True, repr=False)
class Tags:
    """See `tags`."""

    names: tuple[str, ...]
    opened: bool = False
    outside: bool = False

    def __post_init__(self) -> None:
        bad = [name for name in self.names if not re.fullmatch(r"[\w.:-]+", str(name))]
        if bad or not self.names or len(set(self.names)) < len(self.names):
            raise DataError(f"tags: wanted different names of tags, as tags('think', 'answer'), got {self.names!r}")

    def __call__(self, rollout: Rollout) -> float:
        text = f"<{self.names[0]}>{rollout.text}" if self.opened else rollout.text
        names = "|".join(map(re.escape, self.names))
        marks = list(re.finditer(f"<(/?(?:{names}))>", text))
        if [mark[1] for mark in marks] != [mark for name in self.names for mark in (name, f"/{name}")]:
            return 0.0
        borders = [0, *(place for mark in marks for place in mark.span()), len(text)]
        around = [text[borders[i] : borders[i + 1]] for i in range(0, len(borders), 4)]
        return float(self.outside or not any(piece.strip() for piece in around))

    def __repr__(self) -> str:
        return shown("tags", *self.names, opened=self.opened, outside=self.outside)


def tags(*names: str, opened: bool = False, outside: bool = False) -> Tags:
    """1.0 where each tag is opened and closed once, in this order, not nested, with nothing but white space outside.

    `opened`: the prompt's end has opened the first tag already; `outside`: other text may stand around them.
    """
    return Tags(tuple(names), opened, outside)


def zero(rollout: Rollout) -> float:
    """0 for every completion: of a trainer whose policy learns from a teacher alone."""
    return 0.0


def label_texts(rollout: Rollout, by: By) -> list[str]:
    """Return the texts that meet a label: its own, each entry's of a list; of a truth value JSON's too."""
    label = read(rollout, by)
    label = label.tolist() if hasattr(label, "tolist") else label  # numpy's, as a column of Parquet has them
    several = list(label) if isinstance(label, list | tuple) else [label]
    if not several:
        raise DataError("the label is an empty list: no answer is right")
    return [text for one in several for text in _spellings(one)]


def _spellings(label: Any) -> list[str]:
    return [str(label), str(label).lower()] if isinstance(label, bool) else [str(label)]
