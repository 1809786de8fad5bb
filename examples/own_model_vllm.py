"""own_model.py's architecture for vLLM: the same layers and names of weights, around vLLM's paged attention."""

from collections.abc import Iterable

from own_model import SIZES, TinyLM
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import AutoWeightsLoader


class VllmTinyLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.model = TinyLM(**SIZES)
        heads, size = SIZES["num_attention_heads"], SIZES["hidden_size"] // SIZES["num_attention_heads"]
        self.paged = nn.ModuleList(
            Attention(heads, size, size**-0.5, cache_config=vllm_config.cache_config, prefix=f"{prefix}.paged.{i}.attn")
            for i in range(SIZES["num_hidden_layers"])
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.tokens(input_ids)

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: object = None, inputs_embeds: object = None
    ) -> Tensor:
        """(N,) tokens of all requests in a row to (N, hidden)."""
        x = self.model.embed(input_ids, positions)
        for block, attention in zip(self.model.blocks, self.paged, strict=True):

            def attend(*given: Tensor, attention: nn.Module = attention) -> Tensor:
                queries, keys, values = (tensor.flatten(-2) for tensor in given)
                return attention(queries, keys, values).unflatten(-1, given[0].shape[-2:])

            x = block(x, attend)
        return x

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.model.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take tensors by the checkpoint's and the trainer's names, through vLLM's loader: during a sync what is copied
        into a parameter by hand is lost, and the sync says so by its log-probs."""
        return AutoWeightsLoader(self).load_weights((f"model.{name}", tensor) for name, tensor in weights)
