"""Images that an environment showed stay with their completions, and with the tokens at which they begin."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from rlbench.data import EncodedImage, Prompt, Rollouts
from rlbench.data.prompts.images import PlacedImage, counted_from
from rlbench.data.texts.media_features import shown_at
from rlbench.errors import DataError
from rlbench.session.training.reward_steps import up_to_the_end
from tests.data.values import generated, rollouts

RED, BLUE = (EncodedImage.from_any(np.full((4, 4, 3), value, np.uint8)) for value in (200, 30))
AT = [0, 2, 1]


def seen() -> Rollouts:
    """Three prompts, of which the first has an image, two completions each; every second is shown one, the last two."""
    made = rollouts()
    placed = [PlacedImage.of(BLUE, at) for at in AT]
    shown = ((), (placed[0],), (), (placed[1],), (), (placed[2], PlacedImage.of(RED, 4)))
    first = replace(made.prompts[0], images=(RED,))
    return replace(made, prompts=(first, *made.prompts[1:]), observed_images=shown).score(range(6))


def places(images: tuple[EncodedImage, ...]) -> list[tuple[str, int | None]]:
    return [("red" if image.digest == RED.digest else "blue", getattr(image, "at", None)) for image in images]


def test_a_batch_has_those_of_the_prompt_and_then_those_observed() -> None:
    batch = seen().batch(lambda rewards, group: rewards)
    assert [places(own) for own in batch.images] == [
        [("red", None)],
        [("red", None), ("blue", 0)],
        [],
        [("blue", 2)],
        [],
        [("blue", 1), ("red", 4)],
    ]
    assert batch.media == ("images",) and batch.rows([2, 4]).media == ()


def test_they_follow_their_completions_through_selection_and_merging() -> None:
    chosen = seen().select([5, 1])
    assert [places(own) for own in chosen.observed_images] == [[("blue", 1), ("red", 4)], [("blue", 0)]]
    assert [places(own) for own in seen()[1:].observed_images] == [[], [("blue", 2)], [], [("blue", 1), ("red", 4)]]
    turns = {"mask": np.ones(3, bool), "turns": np.zeros(3, np.int32), "turn_rewards": [[1.0]], "infos": [{}]}
    parts = [
        replace(generated([(p, 0, [1, 2, 3], "stop")]), observed_images=[(PlacedImage.of(BLUE, p),)], **turns)
        for p in (1, 0)
    ]
    merged = Rollouts.merge([Prompt("a"), Prompt("b")], parts, {})
    assert [places(own) for own in merged.observed_images] == [[("blue", 0)], [("blue", 1)]]
    bare = Rollouts.merge([Prompt("a")], [replace(generated([(0, 0, [1, 2, 3], "stop")]), **turns)], {})
    assert bare.observed_images == ()


def test_a_completion_tells_where_they_stand_behind_its_prompt() -> None:
    *_, last = seen().flat
    assert [image.at for image in last.observed_images] == [1, 4] and len(last.prompt_token_ids) == 3
    assert places(last.all_images) == [("blue", 4), ("red", 7)]
    assert last.observed_images[0].pil().getpixel((0, 0)) == (30, 30, 30)


def test_rows_to_be_scored_end_at_the_last_trained_token_and_so_do_their_images() -> None:
    batch = seen().batch(lambda rewards, group: rewards)
    mask = batch.mask.copy()
    mask[-3:] = False  # of the last completion's six tokens, the last image's among them
    rows, images = up_to_the_end(batch.replace(mask=mask))
    assert [len(row) for row in rows] == [2, 3, 5, 6, 8, 6] and places(images[5]) == [("blue", 4)]
    assert places(images[1]) == [("red", None), ("blue", 1)]
    assert places(counted_from(images[1], 2)) == [("red", None), ("blue", -1)]


def test_an_image_that_many_are_shown_is_sent_once() -> None:
    noise = EncodedImage.from_any(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    assert len(pickle.dumps([PlacedImage.of(noise, at) for at in range(50)])) < len(noise.data) + 10_000


def test_only_their_own_tokens_are_theirs() -> None:
    stands = np.array([0, 1, 1, 0, 1, 0, 1, 1, 1, 0], bool)  # two of the prompt, one that was sampled, three observed
    held = shown_at(stands, [RED, PlacedImage.of(BLUE, 3)], [2, 3], prompt=3)
    assert np.flatnonzero(held).tolist() == [1, 2, 6, 7, 8]
    assert np.flatnonzero(shown_at(stands, [RED], [3], prompt=3)).tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("images", "counts", "token"),
    [
        ([RED], [7], "has 6 image tokens, its 1 images 7"),
        ([RED, PlacedImage.of(BLUE, 3)], [4, 3], "has 3 image tokens, its 1 images 4"),
        ([PlacedImage.of(BLUE, 2)], [3], "has 2 image tokens at 5"),
        ([PlacedImage.of(BLUE, 5)], [3], "has 1 image tokens at 8"),
        ([PlacedImage.of(BLUE, 3), RED], [3, 2], "another order"),
        ([PlacedImage.of(BLUE, 3), PlacedImage.of(BLUE, 1)], [3, 1], "another order"),
        ([PlacedImage.of(BLUE, 3), PlacedImage.of(BLUE, 4)], [3, 2], "image tokens at 7"),
    ],
)
def test_places_without_their_tokens_are_refused(images, counts, token) -> None:
    stands = np.array([0, 1, 1, 0, 1, 0, 1, 1, 1, 0], bool)
    with pytest.raises(DataError, match=token):
        shown_at(stands, images, counts, prompt=3)
