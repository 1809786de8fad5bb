"""Which verbs of a record led to where the session stands, and which statements a script of them needs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlbench.errors import SessionError
from rlbench.session.recording import STEPS, Entry

LEFT_OUT = {
    "save": "it would write there again",
    "export": "it would write there again",
    "heal": "this script has no fault to heal from",
    "pause": "it only waits",
    "resume": "it only waits",
    "track": "it would log there again",
    "untrack": "it would log there again",
}
GO_BACK = ("restore", "undo", "heal")
TAKEN_BACK = {
    *STEPS,
    *GO_BACK,
    *LEFT_OUT,
    "rollout",
    "forward_backward",
    "zero_grad",
    "evaluate",
    "loss_lab",
    "gradients",
    "logprobs",
    "snapshot",
    "drop",
    "sync_weights",
    "preflight",
    "rehearse",
    "set_lr",
}
"""Verbs of which nothing is left once the session went back: code that was put on the ranks stays there."""
ON_RANKS = {*STEPS, "forward_backward", "zero_grad", "set_lr", "heal"}
"""Of those, the ones that a heal takes back which found the session where its snapshot is."""
VARIABLE = re.compile(r"\b(?:rollouts|scored|joined|batch|evaluation|snapshot|lab)_\d+\b")


def why_not(entry: Entry) -> str:
    """Why a verb has no statement in a script; empty where it has."""
    if entry.verb in LEFT_OUT:
        return LEFT_OUT[entry.verb]
    if entry.outcome == "failed":
        return f"it failed: {' '.join(entry.said.split())}"
    if entry.outcome == "running":
        return "its result was never asked for"
    if entry.outcome == "stopped" and not entry.partial:
        return f"it was stopped: {' '.join(entry.said.split())}"
    return ""


def course(entries: Sequence[Entry], everything: bool = False) -> set[int]:
    """Places of the verbs that led to where the session stands.

    Going back to a snapshot takes back what came after it. All verbs count where that cannot be told apart: code was
    put on the ranks meanwhile, the replicas did not follow, something later needs what was made there, or the snapshot
    is not in the record.

    Raises:
        SessionError: a worker died and what it held was not all brought back: no script can do that again.
    """
    kept = None if everything else _straight(entries)
    if kept is None:
        for entry in entries:
            if entry.verb == "heal" and (entry.lost or entry.snapshot):
                why = entry.lost or "heal() went back to a snapshot"
                raise SessionError(
                    f"{why}: a script cannot lose a worker and go on as this session did; export it without "
                    "undone=True, or from a session without a death in it"
                )
        return set(range(len(entries)))
    return kept


def _straight(entries: Sequence[Entry]) -> set[int] | None:
    """The verbs that count, with what was taken back left out; None where that cannot be told apart."""
    kept: list[int] = []
    there: dict[str, list[int]] = {}
    for i, entry in enumerate(entries):
        kept.append(i)
        done = entry.outcome == "done"
        if done and entry.verb == "heal" and entry.lost:
            return None
        if done and entry.verb in GO_BACK and (entry.verb != "heal" or entry.snapshot):
            back = there.get(entry.snapshot or "")
            if back is None or "sync=False" in entry.code:
                return None
            since = [k for k in kept if k not in back]
            if any(entries[k].verb not in TAKEN_BACK and not why_not(entries[k]) for k in since):
                return None
            stepped = any(entries[k].verb in STEPS and entries[k].outcome == "done" for k in since)
            stays = [] if stepped or entry.verb != "heal" else [k for k in since if entries[k].verb not in ON_RANKS]
            kept = [*back, *stays]
        elif done and entry.verb == "branch":
            return None
        elif entry.snapshot and (done or entry.verb in STEPS):  # a step that failed was kept before, too
            there[entry.snapshot] = _without_pending(entries, kept[:-1] if entry.verb in STEPS else kept)
        if entry.after:
            there[entry.after] = _without_pending(entries, kept)
    counts = set(kept)
    lines = needed_lines(entries, counts)
    codes = [entries[i].code for i in counts if not why_not(entries[i])]
    text = " ".join([*codes, *(line for one in lines for line in one)])
    made = {entry.variable for i, entry in enumerate(entries) if entry.variable and i not in counts}
    return None if made & set(VARIABLE.findall(text)) else counts


def _without_pending(entries: Sequence[Entry], kept: Sequence[int]) -> list[int]:
    """Going back drops gradients that wait for a step: the backwards since the last one count no more."""
    found: list[int] = []
    pending = True
    for k in reversed(kept):
        pending = pending and not (entries[k].verb in (*STEPS, "zero_grad") and entries[k].outcome == "done")
        if not (pending and entries[k].verb == "forward_backward"):
            found.append(k)
    return found[::-1]


def needed_lines(entries: Sequence[Entry], kept: set[int]) -> list[list[str]]:
    """Of each verb, the lines that make its values: all of those that count, of others what these need."""
    where = {line.partition(" =")[0]: (i, line) for i, entry in enumerate(entries) for line in entry.before}
    acting = [entries[i] for i in kept if not why_not(entries[i])]
    waiting = [name for entry in acting for text in (entry.code, *entry.before) for name in VARIABLE.findall(text)]
    needed: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in where and name not in needed:
            needed.add(name)
            waiting += VARIABLE.findall(where[name][1])
    return [[line for line in entry.before if line.partition(" =")[0] in needed] for entry in entries]
