"""A teacher behind an OpenAI-compatible server: token ids go out as prompts, the prompts' log-probs come back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from rlbench.data import TrainBatch
from rlbench.data.batches.columns import TEACHER, TEACHER_IDS, TEACHER_TOP
from rlbench.dispatch.chain import Steps
from rlbench.errors import BuildError, DataError, EngineError, Stopped
from rlbench.rewards.service import Post, Refused, remote
from rlbench.session.teachers.vocabulary import check_same_tokenizer, probe_texts, tokenizer_of

SEQUENCES, NUMBERS = 8, 200_000
"""In one request, at most: so many sequences, and so many log-probs in its answer unless one sequence has more."""
POLL_S = 0.1
ECHO, PROMPT_LOGPROBS = "echo", "prompt_logprobs"
"""How a server is asked: by OpenAI's first interface, which tells the likeliest tokens by text; by vLLM's, by id."""


@dataclass(frozen=True)
class Said:
    """What a server says of one sequence's response: `logprobs` (R,) and, where asked for, `ids`, `top` (R, K)."""

    logprobs: np.ndarray
    ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True)
class TeacherServer:
    """One model of a server; `how` it is reached, and in which `form` asked."""

    how: remote
    served: str
    form: str

    @classmethod
    def found(
        cls,
        url: str,
        served: str | None,
        tokenizer: str | None,
        own_tokenizer: Any,
        reached: Mapping[str, Any],
    ) -> TeacherServer:
        """Ask the server who it is, whether its tokens are the policy's, and in which form it gives log-probs.

        `reached`: options of `rb.rewards.remote`. Raises BuildError where one of these is not as it must be.
        """
        if urlsplit(url).query:
            raise BuildError("teacher: a key in a url would be shown with it: give token_env=")
        root = url.rstrip("/").removesuffix("/v1")
        how = remote(root, tries=3, **reached)
        listed = cls(how, served or "", PROMPT_LOGPROBS)._asked("/v1/models", None)
        names = [str(one.get("id")) for one in listed.get("data", [])] if isinstance(listed, dict) else []
        if not names or (served is not None and served not in names):
            raise BuildError(f"the server at {cls._place(how)} serves {', '.join(names) or 'nothing'}, not {served!r}")
        server = cls(how, served or names[0], PROMPT_LOGPROBS)
        server._check_tokenizer(tokenizer, own_tokenizer)
        return server._in_its_form(own_tokenizer)

    @property
    def place(self) -> str:
        """Host and port."""
        return self._place(self.how)

    @staticmethod
    def _place(how: remote) -> str:
        return urlsplit(how.url).netloc

    def score_steps(self, batch: TrainBatch, top_k: int, temperature: float | None) -> Steps:
        """Ask for all sequences, several requests at a time."""
        if not len(batch) or not batch.tokens:
            raise DataError("teacher.score: there is no response token to score")
        if (batch.temperature if temperature is None else temperature) != 1.0:
            raise DataError(
                f"a server scores at temperature 1, these tokens were sampled at {batch.temperature:g}: sample at 1, "
                "or say temperature=1.0 and take its log-probs as they are"
            )
        if top_k and self.form == ECHO:
            raise DataError(
                f"the server at {self.place} tells the likeliest tokens by their text alone, which names no token: "
                "top_k needs one with prompt_logprobs, as vLLM's"
            )
        said = yield Asking(self, batch, top_k)
        columns = {TEACHER: np.concatenate([one.logprobs for one in said])}
        if top_k:
            columns |= {name: np.concatenate([getattr(one, key) for one in said]) for name, key in TOP.items()}
        return columns

    def request(self, sequences: Sequence[np.ndarray], top_k: int) -> dict[str, Any]:
        """Return the body that asks about whole sequences of token ids."""
        prompts = [ids.tolist() for ids in sequences]
        body = {"model": self.served, "prompt": prompts, "max_tokens": 1, "temperature": 1.0}
        return body | ({"prompt_logprobs": top_k} if self.form == PROMPT_LOGPROBS else {"echo": True, "logprobs": 1})

    def read(self, answer: Any, sequences: Sequence[np.ndarray], starts: Sequence[int], top_k: int) -> list[Said]:
        """Take the log-probs of each sequence's tokens from its `start` on out of an answer; EngineError where they are
        not in it."""
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != len(sequences):
            raise EngineError(f"the teacher at {self.place} answered {str(answer)[:120]!r} to {len(sequences)} prompts")
        rows = sorted(choices, key=lambda choice: int(choice.get("index", 0)))
        try:
            read = _of_prompt if self.form == PROMPT_LOGPROBS else _of_echo
            return [read(c, ids, start, top_k) for c, ids, start in zip(rows, sequences, starts, strict=True)]
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise EngineError(
                f"the teacher at {self.place} gave no log-prob for each token of a prompt ({type(error).__name__}: "
                f"{error}): it must know prompt_logprobs, as vLLM's server, or echo with logprobs"
            ) from error

    def _in_its_form(self, tokenizer: Any) -> TeacherServer:
        """Return the server asked in a form that it knows."""
        ids = np.asarray(tokenizer("a b")["input_ids"] or [0, 0], np.int32)
        failed: list[Exception] = []
        for server in (self, replace(self, form=ECHO)):
            try:
                server.read(server._asked("/v1/completions", server.request([ids], 0)), [ids], [1], 0)
            except (EngineError, BuildError) as error:
                failed.append(error)
            else:
                return server
        raise BuildError(str(failed[0]))

    def _check_tokenizer(self, named: str | None, own: Any) -> None:
        whose = f"the teacher {self.served!r} at {self.place}"
        if named is not None:
            check_same_tokenizer(own, tokenizer_of(named), whose)
            return
        for text in probe_texts(own):
            ours = own(text, add_special_tokens=False)["input_ids"]
            try:
                body = {"model": self.served, "prompt": text, "add_special_tokens": False}
                theirs = self._post("/tokenize")(json.dumps(body).encode())["tokens"]
            except (Refused, KeyError, TypeError) as error:
                raise BuildError(
                    f"{whose} does not say how it encodes a text (/tokenize), so nobody knows whether its tokens are "
                    f"the policy's: say whose tokenizer it has, tokenizer=folder or hub id ({error})"
                ) from None
            if list(theirs) != list(ours):
                at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), 0)
                raise BuildError(
                    f"{whose} has another tokenizer: of one text its token {at} is {theirs[at : at + 1]} and the "
                    f"policy's {ours[at : at + 1]}, so its log-probs would be of other texts. Take a teacher of the "
                    "policy's own family, or imitate its answers: rb.data.demonstrations"
                )

    def _post(self, path: str) -> Post:
        return Post(replace(self.how, url=self.how.url + path), self.how.request_headers())

    def _asked(self, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            return self._post(path)(None if body is None else json.dumps(body).encode())
        except Refused as error:
            raise BuildError(f"the teacher at {self.place} {error}") from None


TOP = {TEACHER_IDS: "ids", TEACHER_TOP: "top"}


class Asking:
    """A step of a verb that asks a server about a batch; a stop is felt at once."""

    def __init__(self, server: TeacherServer, batch: TrainBatch, top_k: int) -> None:
        self._server, self._batch, self._top_k = server, batch, top_k
        self._post, self._stopped = server._post("/v1/completions"), False
        self._pool = ThreadPoolExecutor(server.how.concurrency, thread_name_prefix="rlbench teacher")
        self._asked = [self._pool.submit(self._one, rows) for rows in requests_of(batch, top_k)]

    def stop(self) -> None:
        """Ask it to stop; returns at once."""
        self._stopped = True
        self._post.stop()

    def result(self) -> list[Said]:
        """Wait for all; Stopped, or EngineError where the teacher failed: then the others are not waited for."""
        try:
            while wait(self._asked, POLL_S, FIRST_EXCEPTION).not_done:
                failed = [one for one in self._asked if one.done() and one.exception() is not None]
                if self._stopped or failed:
                    break
            if self._stopped:
                raise Stopped("teacher.score was stopped: nothing of it is kept, the batch is as it was")
            for one in sorted(self._asked, key=lambda one: not one.done()):
                one.result()  # what failed, before what was never asked
            return [said for one in self._asked for said in one.result()]
        finally:
            self._post.stop()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, rows: range) -> list[Said]:
        batch = self._batch
        sequences = [np.concatenate([batch.prompts[i], batch.responses[i]]) for i in rows]
        starts = [len(batch.prompts[i]) for i in rows]
        body = self._server.request(sequences, self._top_k)
        try:
            answer = self._post(json.dumps(body).encode())
        except Refused as error:
            done = sum(one.done() and one.exception() is None for one in self._asked)
            raise EngineError(
                f"the teacher at {self._server.place} {error}; {done} of {len(self._asked)} requests were answered and "
                "nothing was kept: batch and session are as they were. teacher.score(…) again once it is there"
            ) from None
        return self._server.read(answer, sequences, starts, self._top_k)


def requests_of(batch: TrainBatch, top_k: int) -> list[range]:
    """Cut a batch into the rows of each request."""
    cuts, numbers = [0], 0
    for row, length in enumerate(batch.lengths.tolist()):
        if row - cuts[-1] == SEQUENCES or (numbers and numbers + length * (top_k + 1) > NUMBERS):
            cuts.append(row)
            numbers = 0
        numbers += length * (top_k + 1)
    return [range(*ends) for ends in zip(cuts, [*cuts[1:], len(batch)], strict=True)]


def is_url(model: str) -> bool:
    """Whether a model is named by where it is served."""
    return model.startswith(("http://", "https://"))


def _of_prompt(choice: Mapping[str, Any], ids: np.ndarray, start: int, top_k: int) -> Said:
    """vLLM's `prompt_logprobs`: at each place a mapping of token ids, the likeliest and the prompt's own."""
    places = choice["prompt_logprobs"][start : len(ids)]
    if len(places) != len(ids) - start:
        raise ValueError(f"{len(places)} places for {len(ids) - start} tokens")
    found = [{int(token): float(entry["logprob"]) for token, entry in place.items()} for place in places]
    logprobs = np.array([place[int(token)] for place, token in zip(found, ids[start:], strict=True)], np.float32)
    best = [sorted(place, key=place.__getitem__, reverse=True)[:top_k] for place in found]
    if any(len(one) < top_k for one in best):
        raise ValueError(f"fewer than {top_k} tokens at a place")
    kept = np.array(best, np.int32).reshape(len(found), top_k)
    top = np.array([[p[t] for t in one] for p, one in zip(found, best, strict=True)], np.float32)
    return Said(_finite(logprobs), kept, top.reshape(len(found), top_k))


def _of_echo(choice: Mapping[str, Any], ids: np.ndarray, start: int, top_k: int) -> Said:
    """OpenAI's `echo` with `logprobs`: of the prompt's own tokens, in their order."""
    given = choice["logprobs"]["token_logprobs"][start : len(ids)]
    logprobs = np.array([float(one) for one in given], np.float32)
    if len(logprobs) != len(ids) - start:
        raise ValueError(f"{len(logprobs)} numbers for {len(ids) - start} tokens")
    empty = np.zeros((len(logprobs), top_k))
    return Said(_finite(logprobs), empty.astype(np.int32), empty.astype(np.float32))


def _finite(logprobs: np.ndarray) -> np.ndarray:
    bad = [value for value in logprobs.tolist() if math.isnan(value) or value > 1e-3]
    if bad:
        raise ValueError(f"{bad[0]} is no log-prob")
    return logprobs
