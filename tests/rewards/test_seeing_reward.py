"""A reward model that sees, in this process, against transformers' own backbone, processor and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlbench.data import EncodedImage, Prompt, Ragged, Rollouts
from rlbench.data.prompts.images import PlacedImage
from rlbench.data.prompts.prompt import as_prompts
from rlbench.errors import DataError
from rlbench.rewards import model
from tests.data.written import written

SMALL, WIDE, TALL = (
    EncodedImage.from_any(np.random.default_rng(i).integers(0, 255, (*size, 3), np.uint8))
    for i, size in enumerate([(56, 56), (56, 84), (112, 56)])
)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def eyes(request: Any, tmp_path_factory: Any) -> str:
    """A random classifier as `rb.RewardModel` saves one, with the processor of its family."""
    import torch

    from rlbench.rewards.media_classifier import media_classifier
    from tests.trainers.seeing import build_eyes

    folder = str(tmp_path_factory.mktemp(request.param))
    seeing, processor = build_eyes(request.param, 1)
    seeing.config.num_labels = 1
    classifier: Any = media_classifier(seeing.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        network = classifier(seeing.config)
        for parameter in network.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


class Reference:
    """transformers' backbone, without padding: it finds placeholders and positions by itself."""

    def __init__(self, folder: str) -> None:
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModel, AutoProcessor

        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.backbone: Any = AutoModel.from_config(AutoConfig.from_pretrained(folder)).eval()
        weights = load_file(Path(folder) / "model.safetensors")
        self.head = weights.pop("score.weight")
        self.backbone.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})

    def messages(self, chat: Sequence[Any], images: Sequence[EncodedImage]) -> float:
        """The reward of a conversation, by its chat template."""
        pixels = iter([image.pil() for image in images])
        shown = [
            message | {"content": [p | {"image": next(pixels)} if p["type"] == "image" else p for p in content]}
            if isinstance(content := message["content"], list)
            else message
            for message in chat
        ]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        return self.inputs(self.processor.apply_chat_template(shown, **options))

    def ids(self, ids: Sequence[int], images: Sequence[EncodedImage]) -> float:
        """The reward of token ids, all of whose placeholders are images'."""
        import torch

        tokens = torch.tensor([[*map(int, ids)]])
        inputs = {"input_ids": tokens}
        if images:
            inputs |= dict(self.processor.image_processor([i.pil() for i in images], return_tensors="pt"))
            inputs["mm_token_type_ids"] = (tokens == self.processor.image_token_id).int()
        return self.inputs(inputs)

    def inputs(self, inputs: Any) -> float:
        import torch

        with torch.no_grad():
            return float(self.head @ self.backbone(**inputs).last_hidden_state[0, -1])


def asked(*images: EncodedImage) -> list[Any]:
    return [{"role": "user", "content": [*({"type": "image", "image": i} for i in images), text("which?")]}]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def pictured(folder: str = "") -> Rollouts:
    """Prompts with two images, one, and none; what was answered to each."""
    prompts = as_prompts([asked(SMALL, WIDE), asked(TALL), [{"role": "user", "content": "which?"}]])
    return written(prompts, [["red", "a longer answer"], ["b", "gray"], ["c", "dd"]], tokenizer=folder)


def sampled(folder: str, observed: bool, per_image: int = 1) -> Rollouts:
    """The same with the prompts' tokens as a sampler has them, each image `per_image` times too long; `observed`: an
    environment showed an image behind the first token of every second answer."""
    from transformers import AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(folder)
    made, token = pictured(folder), processor.image_token_id
    merged = {
        i: int(processor.image_processor([i.pil()])["image_grid_thw"][0].prod()) // 4 for i in (SMALL, WIDE, TALL)
    }
    prompts = [[1, *(t for i in p.images for t in [2, *[token] * merged[i] * per_image]), 3] for p in made.prompts]
    made = replace(made, prompt_ids=Ragged.from_rows(prompts, np.int32))
    if not observed:
        return made
    responses = [
        [r[0], *([token] * merged[WIDE] if i % 2 else []), *r[1:].tolist()] for i, r in enumerate(made.responses)
    ]
    shown = tuple((PlacedImage.of(WIDE, 1),) if i % 2 else () for i in range(len(made.texts)))
    flat = Ragged.from_rows(responses, np.int32)
    return replace(made, responses=flat, logprobs=np.zeros(len(flat.values), np.float32), observed_images=shown)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_conversations_are_read_by_its_template_with_their_images(eyes: str, batch_size: int) -> None:
    reference, rollouts = Reference(eyes), pictured()
    wanted = [reference.messages(r.messages, r.images) for r in rollouts.flat]
    scored = rollouts.score(model(eyes, batch_size=batch_size, device="cpu"))
    np.testing.assert_allclose(scored.rewards, wanted, atol=1e-5)
    assert len(set(np.round(wanted, 4))) == 6
    others = [Prompt(p.content, images=tuple(TALL if i is SMALL else i for i in p.images)) for p in rollouts.prompts]
    moved = replace(rollouts, prompts=tuple(others)).score(model(eyes, device="cpu")).rewards - scored.rewards
    assert (np.abs(moved) > 1e-4).tolist() == [True, True, False, False, False, False], "it looks at them"


def test_a_head_that_pools_another_layer_reads_images_as_well(eyes: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoProcessor

    from rlbench.rewards.shaped_head import HeadShape, ShapedHead

    reference, config, shape = Reference(eyes), AutoConfig.from_pretrained(eyes), HeadShape("attention", 1)
    shape.put(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        head = ShapedHead(config.get_text_config().hidden_size, 1, shape)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    weights = {n: t for n, t in load_file(Path(eyes) / "model.safetensors").items() if n != "score.weight"}
    weights |= {f"shaped_score.{n}": p.detach() for n, p in head.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(eyes).save_pretrained(tmp_path)

    def pooled(inputs: Any) -> float:
        with torch.no_grad():
            states = reference.backbone(**inputs, output_hidden_states=True).hidden_states[1][0]
            keys, values = (part(states).unflatten(1, (4, -1)) for part in (head.key, head.value))
            weighed = torch.einsum("thd,hd->th", keys, head.query.unflatten(0, (4, -1))) / keys.shape[-1] ** 0.5
            return float(head.weight @ torch.einsum("th,thd->hd", weighed.softmax(0), values).flatten())

    reference.inputs = pooled  # type: ignore[method-assign]
    rollouts = pictured()
    wanted = [reference.messages(r.messages, r.images) for r in rollouts.flat]
    np.testing.assert_allclose(rollouts.score(model(tmp_path, device="cpu")).rewards, wanted, atol=1e-5)
    assert len(set(np.round(wanted, 4))) == 6


def test_an_environments_image_stands_in_the_conversation(eyes: str) -> None:
    rollouts = pictured()
    said = [
        [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": [text("look:"), {"type": "image"}]},
            {"role": "assistant", "content": "and red"},
        ]
        for answer in rollouts.texts
    ]
    seen = replace(
        rollouts,
        infos=tuple({"turns": 2, "messages": messages} for messages in said),
        observed_images=((PlacedImage.of(TALL, 0),),) * len(rollouts.texts),
    )
    reference = Reference(eyes)
    wanted = [reference.messages(r.messages, (*r.images, TALL)) for r in seen.flat]
    np.testing.assert_allclose(seen.score(model(eyes, device="cpu")).rewards, wanted, atol=1e-5)


@pytest.mark.parametrize("observed", [False, True])
def test_the_tokens_as_they_were_sampled_with_all_images(eyes: str, observed: bool) -> None:
    reference, rollouts = Reference(eyes), sampled(eyes, observed)
    wanted = [reference.ids([*r.prompt_token_ids, *r.token_ids], r.all_images) for r in rollouts.flat]
    scored = rollouts.score(model(eyes, as_sampled=True, device="cpu", batch_size=3))
    np.testing.assert_allclose(scored.rewards, wanted, atol=1e-5)


def test_tokens_of_a_policy_that_gives_images_more_of_them_are_read_as_texts(eyes: str) -> None:
    reader = model(eyes, as_sampled=True, device="cpu")
    longer = sampled(eyes, False, per_image=2).score(reader).rewards
    own = sampled(eyes, False).score(reader).rewards
    texts = replace(pictured(), prompt_ids=Ragged.from_rows([[]] * 3, np.int32)).score(reader).rewards
    np.testing.assert_array_equal(longer[:4], texts[:4])
    assert np.abs(longer[:4] - own[:4]).min() > 1e-4
    kept = sampled(eyes, True, per_image=2).score(reader, on_error="keep")
    assert np.isnan(kept.rewards).tolist() == [False, True] * 2 + [False] * 2
    assert "only a model with the policy's own tokens" in kept.reward_errors[0].error


def test_a_placeholder_that_the_policy_sampled_is_a_token_as_others(eyes: str) -> None:
    reader, made = model(eyes, as_sampled=True, device="cpu"), sampled(eyes, False)
    plain = made.score(reader).rewards
    values = made.responses.values.copy()
    values[made.responses.offsets[:-1]] = reader._loaded[2]._tokens.token  # type: ignore[index]
    stray = replace(made, responses=made.responses.with_values(values)).score(reader).rewards
    assert np.isfinite(stray).all() and np.abs(stray - plain).min() > 1e-4


def test_a_model_of_text_refuses_images_and_texts_need_a_place_for_each(eyes: str, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from rlbench.tiny.tokenizer import build_tokenizer

    config = Qwen2Config(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path)
    build_tokenizer(128).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"4 of 6 completions have images.*sees none"):
        pictured().score(model(tmp_path, device="cpu"))
    kept = pictured().score(model(eyes, chat=False, device="cpu"), on_error="keep")
    assert np.isnan(kept.rewards).tolist() == [True] * 4 + [False] * 2
    assert "0 of the model's placeholders and 2 images" in kept.reward_errors[0].error
