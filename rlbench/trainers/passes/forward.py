"""A model's log-probs and entropies of response tokens, packed or padded, with or without its logits.

By default the output layer gives the log-probs itself, chunk by chunk (`chunked_head`), once that was proved to give
what the logits give; a model that does not allow it is run with its logits, and `head_used` says why.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlbench.data.batches.batch import TrainBatch
from rlbench.data.batches.sequences import as_batch as as_batch
from rlbench.errors import DataError, EngineError
from rlbench.trainers.passes.attention import packed_attention
from rlbench.trainers.passes.chunked_head import Head, UnfitHead, token_bytes, watched_head
from rlbench.trainers.passes.packing import ModelInputs, model_inputs
from rlbench.trainers.passes.token_keeper import TokenGradients
from rlbench.trainers.passes.token_stats import token_stats
from rlbench.user_code import user_code

CHECK_TOKENS = 24
CHECK_TOLERANCE, HALF_TOLERANCE = 1e-4, 0.05
CHECK_TEMPERATURE = 0.7


class PolicyModel:
    """One module as a policy. `module(input_ids, …)` gives logits, or something that has `.logits`.

    Args:
        module: sharded.
        device: of its inputs.
        half: it computes in half precision, whatever its parameters are.
    """

    def __init__(self, module: nn.Module, device: torch.device, half: bool) -> None:
        self.module = module
        self.device = device
        self._half = half or next(module.parameters()).dtype in (torch.float16, torch.bfloat16)
        self._parameters = inspect.signature(module.forward).parameters
        self._packing_proved = False
        self._heads: dict[bool, Head | str] = {}  # by packing: proved, or why not

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer; the widest parameter stands in where the model does not say."""
        config = getattr(self.module, "config", None)
        size = getattr(config, "vocab_size", None) or getattr(getattr(config, "text_config", None), "vocab_size", None)
        return int(size or max((max(p.shape, default=1) for p in self.module.parameters()), default=1))

    def check_tokens(self, batch: TrainBatch) -> None:
        """Refuse token ids the model has no embedding for, before any rank enters a collective."""
        if getattr(getattr(self.module, "config", None), "vocab_size", None) is None:
            return
        for name, ids in (("prompts", batch.prompts.values), ("responses", batch.responses.values)):
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
                raise DataError(
                    f"the {name} hold token ids from {ids.min()} to {ids.max()}, the model's vocabulary has "
                    f"{self.vocab_size}; tokenise with the model's own tokenizer."
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
    ) -> Iterator[tuple[Tensor, Tensor, ModelInputs]]:
        """Log-probs and entropies (R,) of the response tokens of `rows`; run the backward inside the
        context. `head` is `PolicyOptions.head`; `watch` takes each token's gradients; `chunk_rows` as of `Head.run`."""
        chunked = self.prove(rows, packed, head)
        with ExitStack() as within:
            with user_code():
                inputs = model_inputs(rows, self.device, packed)
                if packed:
                    within.enter_context(packed_attention(self.module, inputs.lengths))
                logprobs, entropy = self._stats(inputs, temperature, packed, chunked, watch, chunk_rows)
                if watch is not None:
                    watch.watch(logprobs, entropy)
            yield logprobs, entropy, inputs

    def _stats(
        self,
        inputs: ModelInputs,
        temperature: float,
        packed: bool,
        head: Head | None,
        watch: TokenGradients | None = None,
        chunk_rows: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        if head is None:
            with watched_head(self.module, watch, None if packed else inputs.predictors):
                logits = self._packed_logits(inputs) if packed else self._padded_logits(inputs)
            return token_stats(logits, inputs.targets, temperature)
        run = self._run_packed if packed else self._run_padded
        positions = None if packed else inputs.predictors
        return head.run(lambda: _logits(run(inputs)), positions, inputs.targets, temperature, watch, chunk_rows)

    def _run_packed(self, inputs: ModelInputs) -> Any:
        return self.module(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=inputs.predictors,
        )

    def _packed_logits(self, inputs: ModelInputs) -> Tensor:
        return _logits(self._run_packed(inputs))[0]

    def _run_padded(self, inputs: ModelInputs) -> Any:
        """Right-padded: causal attention never looks at the padding, whatever of the mask the model takes."""
        offered = {
            "attention_mask": inputs.attention_mask,
            "position_ids": inputs.position_ids,
            "use_cache": False,
        }
        taken = {name: value for name, value in offered.items() if name in self._parameters}
        return self.module(inputs.input_ids, **taken)

    def _padded_logits(self, inputs: ModelInputs) -> Tensor:
        logits = _logits(self._run_padded(inputs))
        if logits.dim() != 3 or logits.shape[:2] != inputs.input_ids.shape:
            raise EngineError(
                f"{type(self.module).__name__} returned logits of shape {tuple(logits.shape)} for input ids "
                f"of shape {tuple(inputs.input_ids.shape)}; a policy returns (sequences, tokens, "
                "vocabulary), or an output with .logits of that shape."
            )
        return logits.flatten(0, 1)[inputs.predictors]

    def prove(self, batch: TrainBatch, packed: bool, head: str = "auto") -> Head | None:
        """Prove once, on two short sequences, that the model computes the same packed and by its output layer alone.

        Collective: the ranks go through the same collectives whatever each of them finds.

        Returns:
            The output layer that gives log-probs itself, or None where the logits are needed.

        Raises:
            EngineError: it cannot run packed, or head="chunked" is not possible.
        """
        if packed and not self._packing_proved:
            self._prove_packing(batch)
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

    def _prove_packing(self, batch: TrainBatch) -> None:
        """Refuse a model whose layers look from one sequence into the next (recurrence, attention of its own)."""
        from transformers import PreTrainedModel

        name = type(self.module).__name__
        lacking = [n for n in ("position_ids", "logits_to_keep", "use_cache") if n not in self._parameters]
        if not isinstance(self.module, PreTrainedModel) or lacking:
            raise EngineError(
                f"{name} cannot run packed: packing needs a transformers causal model whose forward takes "
                "position_ids, use_cache and logits_to_keep; pass packing=False."
            )
        packed, padded = (self._probed(batch, packed, 1.0, None)[0] for packed in (True, False))
        gap = float((packed - padded).abs().mean())
        if not gap <= (HALF_TOLERANCE if self._half else CHECK_TOLERANCE):
            raise EngineError(
                f"{name} computes something else when sequences are packed (mean log-prob difference "
                f"{gap:.2g}): its layers look across sequences; pass packing=False."
            )
        self._packing_proved = True

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
            for part in self.module.modules():  # the forward may have ended between gather and release
                if isinstance(part, FSDPModule):
                    part.reshard()
            return f"plain: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        gap = max(float((a - b).abs().mean()) for a, b in zip(plain, chunked, strict=True))
        if not gap <= (HALF_TOLERANCE if self._half else CHECK_TOLERANCE):
            return f"plain: the output layer's own log-probs differ from those of the logits by {gap:.2g}"
        return head

    @torch.no_grad()
    def _probed(self, batch: TrainBatch, packed: bool, temperature: float, head: Head | None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of two short sequences made of the batch's tokens."""
        inputs = model_inputs(_probe(batch), self.device, packed)
        attention = packed_attention(self.module, inputs.lengths) if packed else nullcontext()
        with user_code(), evaluating(self.module), attention:
            return self._stats(inputs, temperature, packed, head)


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


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise EngineError(f"the module returned {type(output).__name__}; a policy returns logits or has .logits.")
    return logits


def _probe(batch: TrainBatch) -> TrainBatch:
    """Two sequences of different length from the first rows' own tokens, the second behind the first."""
    tokens = np.concatenate([batch.prompts.values, batch.responses.values])
    tokens = np.resize(tokens, 2 * CHECK_TOKENS)
    return as_batch([tokens[:CHECK_TOKENS], tokens[CHECK_TOKENS // 2 : 2 * CHECK_TOKENS - 5]])


DUMMY = as_batch([np.zeros(2, np.int32)])
"""What a rank without a micro-batch computes, so that its peers' collectives complete."""
