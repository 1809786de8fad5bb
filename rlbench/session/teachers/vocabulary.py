"""Whether two tokenizers are the same: then a token's id means one text to both models."""

from __future__ import annotations

from typing import Any

from rlbench.errors import BuildError

PIECES = 256
"""So many tokens, all over the vocabulary, are made a text of, which both must encode alike."""


def tokenizer_of(path: str) -> Any:
    """Load the tokenizer beside a model; BuildError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"{path!r} has no tokenizer that can be opened ({str(error).splitlines()[0]}), so nobody knows whether its "
            "tokens are the policy's: put the teacher's tokenizer beside its weights"
        ) from error


def check_same_tokenizer(mine: Any, theirs: Any, whose: str) -> None:
    """Refuse another vocabulary, with the first token that differs."""
    own, other = mine.get_vocab(), theirs.get_vocab()
    if own == other:
        return
    by_id = ({number: token for token, number in one.items()} for one in (own, other))
    here, there = by_id
    first = next(number for number in sorted(here.keys() | there.keys()) if here.get(number) != there.get(number))
    raise BuildError(
        f"{whose} has another tokenizer: token {first} is {there.get(first)!r} to it and {here.get(first)!r} to the "
        f"policy ({len(other)} and {len(own)} tokens), so its log-probs would be of other texts. Take a teacher of the "
        "policy's own family, or imitate its answers: rb.data.demonstrations"
    )


def probe_texts(tokenizer: Any) -> list[str]:
    """Texts whose encodings tell tokenizers apart: pieces of the whole vocabulary, and plain language."""
    size = len(tokenizer)
    ids = [i for i in range(0, size, max(1, size // PIECES)) if i not in set(tokenizer.all_special_ids)]
    return ["".join(tokenizer.convert_tokens_to_string([t]) for t in tokenizer.convert_ids_to_tokens(ids)), PLAIN]


PLAIN = "The quick brown fox: 1234567890 + x_1 = (7.5 / 3)?\n\tÀ propos, naïve café — 你好, мир!"
