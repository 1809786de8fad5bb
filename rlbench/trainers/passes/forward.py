"""A model's log-probs and entropies of response tokens, packed or padded, with or without its logits.

By default the output layer gives the log-probs itself, chunk by chunk (`chunked_head`), once that was proved to give
what the logits give; a model that does not allow it is run with its logits, and `head_used` says why.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlbench.data.batches.batch import TrainBatch, to_score
from rlbench.data.batches.batch import as_batch as as_batch
from rlbench.errors import DataError, EngineError
from rlbench.options import OptionError
from rlbench.strategies.flat.units import flat_units
from rlbench.strategies.optim.gradients import full_shape
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.strategies.ranks.sequence import ALONE, SequenceGroup
from rlbench.trainers.passes.attention import NotCausal
from rlbench.trainers.passes.balancing import balanced
from rlbench.trainers.passes.chunked_head import Head, UnfitHead, token_bytes, watched_head
from rlbench.trainers.passes.outputs import NO_MORE, Request, TokenOutputs, of_logits
from rlbench.trainers.passes.packing import ModelInputs, model_inputs
from rlbench.trainers.passes.routing import routed
from rlbench.trainers.passes.sharing import Share, shared
from rlbench.trainers.passes.sounds import media_reader
from rlbench.trainers.passes.token_keeper import TokenGradients
from rlbench.user_code import user_code

CHECK_TOKENS = 24
CHECK_TOLERANCE, HALF_TOLERANCE = 1e-4, 0.05
CHECK_TEMPERATURE = 0.7


class PolicyModel:
    """One sharded module as a policy. `module(input_ids, …)` gives logits, or something that has `.logits`.

    `device` is that of its inputs; `half`: it computes in half precision, whatever its parameters are; `ranks`: that
    split its sequences, and are given the same ones. `CHANNELS`: what `stats` gives of each token; `holds_logits`:
    unless its output layer gives log-probs itself. `control`: of the ranks that run the model together; None: one does.
    `replay`: its routers take the experts that rows bring.
    """

    CHANNELS: ClassVar[tuple[str, ...]] = ("logprobs", "entropy")
    holds_logits: ClassVar[bool] = True

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        half: bool,
        ranks: SequenceGroup = ALONE,
        control: ControlGroup | None = None,
        replay: bool = False,
    ) -> None:
        self.module, self.replay = module, replay
        self._media, self._control = media_reader(module), control
        self.device = device
        self.ranks = ranks
        self._half = half or next(module.parameters()).dtype in (torch.float16, torch.bfloat16)
        self._proved: set[bool] = set()  # that it runs packed, by whether prompts are shared
        self.unpacked = ""
        self._heads: dict[bool, Head | str] = {}  # by packing: proved, or why not

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of a reward model's heads; a policy has none."""
        return ()

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer; the widest parameter stands in where the model does not say."""
        widths = (max(full_shape(p), default=1) for p in self.module.parameters())
        return vocabulary_of(self.module) or int(max(widths, default=1))

    def check_tokens(self, batch: TrainBatch, *more: np.ndarray) -> None:
        """Refuse token ids the model has no embedding for, before any rank enters a collective."""
        check_token_ids(self.module, "the model", batch.prompts.values, batch.responses.values, *more)
        for held in batch.media:
            if self._media is None or held not in self._media.takes:
                does = {"images": "sees", "videos": "watches", "sounds": "hears"}[held]
                raise DataError(
                    f"prompts have {held}, and {type(self.module).__name__} {does} none: take a model that does."
                )
            if self.ranks.size > 1:
                raise DataError(f"prompts have {held}, which are not split over ranks: pass sequence_parallel=1.")
        if self._media is not None and batch.media:
            self._media.check(batch)

    def check_shared(self, batch: TrainBatch) -> None:
        """Refuse to share prompts where each sequence has to be there as a whole."""
        reasons = {
            f"sequence_parallel={self.ranks.size}": self.ranks.size > 1,
            "the experts that the batch brings of each sequence": batch.routing is not None,
            "a reward model, which reads each sequence as a whole": not self.holds_logits,
            f"prompts with {' and '.join(batch.media)}": bool(batch.media),
        }
        for reason, holds in reasons.items():
            if holds:
                raise OptionError(
                    f"share_prompts=True and {reason} cannot be honoured together. Leave one of them out."
                )

    @property
    def token_bytes(self) -> int:
        """What one token of a micro-batch holds for the backward, logits apart; an estimate."""
        return token_bytes(self.module, 2 if self._half else 4)

    def head_used(self, packed: bool) -> str:
        """ "chunked", or "plain" with the reason; "unknown" before the first pass."""
        found = self._heads.get(packed, "unknown")
        return "chunked" if isinstance(found, Head) else found

    @contextmanager
    def stats(
        self,
        rows: TrainBatch,
        temperature: float,
        packed: bool,
        head: str = "auto",
        watch: TokenGradients | None = None,
        chunk_rows: int | None = None,
        request: Request = NO_MORE,
        balance: bool = False,
        share_prompts: bool = False,
    ) -> Iterator[tuple[TokenOutputs, ModelInputs]]:
        """Give log-probs and entropies of the R response tokens of `rows`; run the backward inside the context.

        `head` is `PolicyOptions.head`; `watch` takes each token's gradients; `chunk_rows` as of `Head.run`; `request`:
        what else to give; `balance`: have routers tell how evenly they spread each row's tokens; `share_prompts`: a
        prompt that several packed rows have is computed once.
        """
        chunked = self.prove(rows, packed, "plain" if request.logits else head, share_prompts)
        with ExitStack() as within:
            with user_code():
                inputs = self._inputs(rows, packed, share_prompts)
                inputs = inputs.weighed() if balance else inputs
                share = within.enter_context(shared(self.module, inputs, packed, self.ranks))
                within.enter_context(routed(self.module, share.inputs.routing, self.replay))
                within.enter_context(balanced(self.module, inputs.balance))
                found = self._stats(share, temperature, chunked, watch, chunk_rows, request)
                if watch is not None:
                    watch.watch(found.logprobs, found.entropy, share.joined)
            yield found, inputs

    def _inputs(self, rows: TrainBatch, packed: bool, share_prompts: bool) -> ModelInputs:
        """Lay out a micro-batch, with images, videos or sounds where any rank's has some; collective for models of
        such."""
        inputs = model_inputs(rows, self.device, packed, share_prompts)
        if self._media is None:
            return inputs
        told = [rows.media] if self._control is None else self._control.gather(rows.media)
        there = {name for own in told for name in own}
        return self._media.placed(inputs, rows, packed, there) if there else inputs

    def _stats(
        self,
        share: Share,
        temperature: float,
        head: Head | None,
        watch: TokenGradients | None = None,
        chunk_rows: int | None = None,
        request: Request = NO_MORE,
    ) -> TokenOutputs:
        return share.outputs(self._stats_here(share, temperature, head, watch, chunk_rows, share.asked(request)))

    def _stats_here(
        self,
        share: Share,
        temperature: float,
        head: Head | None,
        watch: TokenGradients | None,
        chunk_rows: int | None,
        request: Request,
    ) -> TokenOutputs:
        """Of the tokens that are predicted on this rank."""
        inputs, packed = share.inputs, share.packed
        chosen = packed and self._chooses  # of a packed row the model gives the logits that are asked for
        positions = None if chosen else inputs.predictors
        if head is not None:
            run = lambda: self._run(inputs, packed)  # noqa: E731
            return head.run(run, positions, inputs.targets, temperature, watch, chunk_rows, request)
        with watched_head(self.module, watch, positions, request.hidden_states) as kept:
            logits = self._run(inputs, packed)
        if request.hidden_states and len(kept) != 1:
            name = type(self.module).__name__
            raise EngineError(f"{name} has no hidden states to give: its output layer ran {len(kept)} times")
        if chosen:
            return self._of_logits(logits[0], inputs, temperature, request, kept)
        if logits.dim() != 3 or logits.shape[:2] != inputs.input_ids.shape:
            raise EngineError(
                f"{type(self.module).__name__} returned logits of shape {tuple(logits.shape)} for input ids of shape "
                f"{tuple(inputs.input_ids.shape)}; a policy returns (sequences, tokens, vocabulary)."
            )
        return self._of_logits(logits.flatten(0, 1)[inputs.predictors], inputs, temperature, request, kept)

    def _of_logits(
        self, logits: Tensor, inputs: ModelInputs, temperature: float, request: Request, kept: list[Tensor]
    ) -> TokenOutputs:
        found = of_logits(logits, inputs.targets, temperature, request)
        if not kept:
            return found
        # by way of the model's output too, so that FSDP's hook on it fires before a gradient comes past it
        through = (found.entropy.nan_to_num(0.0, 0.0, 0.0) * 0.0)[:, None]
        return replace(found, hidden_states=kept[0].to(through.dtype) + through)

    def _run(self, inputs: ModelInputs, packed: bool) -> Tensor:
        """Run the model for its logits; padded on the right: causal attention never looks there, whatever the mask."""
        given = {"attention_mask": inputs.attention_mask, "position_ids": inputs.position_ids, "use_cache": False}
        with nullcontext() if self._media is None else self._media.placing(inputs):
            if packed:
                chosen = {"logits_to_keep": inputs.predictors} if self._chooses else {}
                output = self.module(input_ids=inputs.input_ids, **chosen, **given, **inputs.media)
            else:
                output = self.module(inputs.input_ids, **taken_by(self.module.forward, given), **inputs.media)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise EngineError(f"the module returned {type(output).__name__}; a policy returns logits or has .logits.")
        return logits

    @property
    def _chooses(self) -> bool:
        """Whether the model computes the logits of chosen tokens alone; Qwen2-Audio gives all."""
        return "logits_to_keep" in inspect.signature(self.module.forward).parameters

    def packs(self, batch: TrainBatch) -> bool:
        """Whether the model computes the same with several sequences in a row; `unpacked` says why not. Collective."""
        if self.ranks.size > 1:
            self.prove(batch, packed=True, head="plain")
        elif False not in self._proved and not self.unpacked:
            self.unpacked = self._why_unpacked(batch)
            if not self.unpacked:
                self._proved.add(False)
        return not self.unpacked

    def prove(self, batch: TrainBatch, packed: bool, head: str = "auto", share_prompts: bool = False) -> Head | None:
        """Prove once, on two short sequences, that the model computes the same packed, behind a prompt
        that they share, and by its output layer alone; collective. Gives the output layer that gives log-probs itself,
        or None where the logits are needed."""
        if packed or self.ranks.size > 1:
            self._prove_packing(batch)
        if packed and share_prompts:
            self._prove_packing(batch, share_prompts)
        if head == "plain":
            return None
        if packed not in self._heads:
            self._heads[packed] = self._try_head(batch, packed)
            if isinstance(self._heads[packed], str) and head == "auto":
                warnings.warn(f"log-probs take the whole logits' memory: {self._heads[packed]}", stacklevel=2)
        found = self._heads[packed]
        if isinstance(found, Head):
            return found
        if head == "chunked":
            raise EngineError(f"head='chunked' is not possible ({found}); pass head='auto' or 'plain'.")
        return None

    def _prove_packing(self, batch: TrainBatch, share_prompts: bool = False) -> None:
        """Refuse a model whose layers look from one sequence into the next (recurrence, attention of its own), or not
        into the next slice of one, or not from a response into a prompt that others have, too."""
        if share_prompts in self._proved:
            return
        if why := self._why_unpacked(batch, share_prompts):
            mend = "sequence_parallel=1" if self.ranks.size > 1 else "packing=False"
            raise EngineError(f"{why}; pass {'share_prompts=False' if share_prompts else mend}.")
        self._proved.add(share_prompts)

    def _why_unpacked(self, batch: TrainBatch, share_prompts: bool = False) -> str:
        """Return why the model cannot run so, found on two short sequences; "" where it can."""
        from transformers import PreTrainedModel

        name, needed = type(self.module).__name__, dict.fromkeys(("position_ids", "use_cache"))
        how = "packed" if self.ranks.size == 1 else "split over ranks"
        how = f"{how} behind a prompt that they share" if share_prompts else how
        if not isinstance(self.module, PreTrainedModel) or taken_by(self.module.forward, needed) != needed:
            return f"{name} cannot run {how}, being no causal model of transformers"
        try:
            run = self._probed(batch, True, 1.0, None, share_prompts=share_prompts).logprobs
        except NotCausal as error:
            return str(error)
        padded = self._probed(batch, False, 1.0, None, ALONE, share_prompts).logprobs
        gap = float((run - padded).abs().mean())
        if not differs(gap, self._half):
            return ""
        said = f"{name} computes something else when sequences are {how} (log-probs differ by {gap:.2g})"
        return f"{said}: its layers look across sequences"

    def _try_head(self, batch: TrainBatch, packed: bool) -> Head | str:
        try:
            head = Head.of(self.module)
        except UnfitHead as unfit:
            return f"plain: {unfit}"
        plain = self._probed(batch, packed, CHECK_TEMPERATURE, None)
        try:
            chunked = self._probed(batch, packed, CHECK_TEMPERATURE, head)
        except torch.OutOfMemoryError:
            raise  # of one rank, perhaps: the others go on to other collectives
        except (UnfitHead, RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            if (flat := flat_units(self.module)) is not None:  # the forward may have ended between gather and release
                flat.leave_pass()
            for part in self.module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
            return f"plain: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        both = ((plain.logprobs, chunked.logprobs), (plain.entropy, chunked.entropy))
        gap = max(float((a - b).abs().mean()) for a, b in both)
        if differs(gap, self._half):
            return f"plain: the output layer's own log-probs differ from those of the logits by {gap:.2g}"
        return head

    @torch.no_grad()
    def _probed(
        self,
        batch: TrainBatch,
        packed: bool,
        temperature: float,
        head: Head | None,
        ranks: SequenceGroup | None = None,
        share_prompts: bool = False,
    ) -> TokenOutputs:
        """Log-probs and entropies of two short sequences made of the batch's tokens, that begin alike or not."""
        tokens = np.concatenate([batch.prompts.values, batch.responses.values])
        inputs = model_inputs(probe_of(tokens, share_prompts), self.device, packed, share_prompts)
        attention = shared(self.module, inputs, packed, ranks or self.ranks)
        with user_code(), evaluating(self.module), attention as share:
            return self._stats(share, temperature, head)


def differs(gap: float, half: bool) -> bool:
    """Whether two ways of computing one number are further apart than precision explains; NaN is."""
    return not gap <= (HALF_TOLERANCE if half else CHECK_TOLERANCE)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout; each part goes back to the mode it was in."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def taken_by(forward: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Return those of the offered arguments that a forward takes. One that names a cache and takes more than it names
    takes `use_cache`, which its inner model reads (Qwen3-VL)."""
    parameters = inspect.signature(forward).parameters
    names = set(parameters)
    if "past_key_values" in names and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names.add("use_cache")
    return {name: value for name, value in offered.items() if name in names}


def vocabulary_of(module: nn.Module) -> int | None:
    """The tokens a model has an embedding for; None where its config does not say."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "vocab_size", None)


def check_token_ids(module: nn.Module, whose: str, *rows: Any) -> None:
    """Refuse rows of token ids that a model has no embedding for."""
    size = vocabulary_of(module)
    for ids in rows:
        if size is not None and len(ids) and not (0 <= np.min(ids) and np.max(ids) < size):
            seen = f"there are token ids from {np.min(ids)} to {np.max(ids)}"
            raise DataError(f"{seen}, {whose}'s vocabulary has {size}: tokenise the text with its own tokenizer.")


def probe_of(tokens: np.ndarray, share_prompts: bool = False) -> TrainBatch:
    """Two sequences of different length from these tokens, the second behind the first or, to share a
    prompt, behind the same."""
    tokens = np.resize(tokens, 2 * CHECK_TOKENS)
    if share_prompts:
        prompt, responses = np.split(tokens, [CHECK_TOKENS // 2])
        return to_score([prompt, prompt], np.split(responses, [CHECK_TOKENS // 2]))
    return as_batch([tokens[:CHECK_TOKENS], tokens[CHECK_TOKENS // 2 : 2 * CHECK_TOKENS - 5]])


DUMMY = as_batch([np.zeros(2, np.int32)])
"""What a rank without a micro-batch computes, so that its peers' collectives complete."""
