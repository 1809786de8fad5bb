"""An architecture of your own, none of transformers': it trains, rolls out in vLLM, and its weights are synced.

`TinyLM` is plain torch. What trains is a subclass that says where its weights come from and which parts are units; what
rolls out is the class in own_model_vllm.py, the same layers around vLLM's paged attention. config.json names the
architecture; its sizes have the names of a family that vLLM can read. The reward asks for digits; REINFORCE.

    python examples/own_model.py [--iterations 12]
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import rlbench as rb
from rlbench import NeedParallel

SIZES = {"vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LONGEST = 64


class Block(nn.Module):
    """Attention and an MLP; `attend` takes queries, keys and values (…, heads, size)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, attend) -> Tensor:
        queries, keys, values = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        x = x + self.out(attend(queries, keys, values).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class TinyLM(nn.Module):
    """A decoder with learned positions; `scale` is a buffer: a constructor computes it, and no checkpoint has it."""

    def __init__(self, vocab_size: int, hidden_size: int, num_hidden_layers: int, num_attention_heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, hidden_size), nn.Embedding(LONGEST, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, num_attention_heads) for _ in range(num_hidden_layers))
        self.norm, self.head = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)
        self.register_buffer("scale", torch.tensor(hidden_size**-0.5), persistent=False)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(positions)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)) * self.scale


def causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention over whole sequences (B, T, heads, size)."""
    given = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
    return F.scaled_dot_product_attention(*given, is_causal=True).transpose(1, 2)


class TrainedLM(rb.nn.Fsdp2TrainModule, TinyLM):
    def __init__(self, source: str) -> None:
        super().__init__(**SIZES)
        self.source = source

    def materialization_source(self) -> str:
        return self.source  # or a dict of tensors, or of initialisers: {"tokens.weight": torch.nn.init.normal_, …}

    @property
    def non_split_modules(self) -> set[type[nn.Module]]:
        return {Block}

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids, torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x, causal)
        return self.logits(x)

    def reinforce(self, tokens: list[list[int]], advantages: list[float], start: int) -> None:
        """Add the gradients of this rank's rows, all of one length, whose responses begin at `start`."""
        ids = torch.tensor(tokens, device=self.device)
        logprobs = self(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[:, start - 1 :, 0]
        (-torch.tensor(advantages, device=self.device)[:, None] * logprobs).mean().backward()

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def write_model(folder: Path) -> None:
    """A random model with the tiny tokenizer, as a folder that vLLM opens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((Path(rb.tiny.ensure()) / name).read_text())
    sizes = {**SIZES, "intermediate_size": 4 * SIZES["hidden_size"], "max_position_embeddings": LONGEST}
    said = {"architectures": ["TinyLM"], "model_type": "llama", "torch_dtype": "float32", **sizes}
    (folder / "config.json").write_text(json.dumps(said))
    torch.manual_seed(0)
    save_file(TinyLM(**SIZES).state_dict(), folder / "model.safetensors", {"format": "pt"})


def main(iterations: int, folder: Path) -> None:
    write_model(folder)
    rb.init(devices=2)
    place = Path(__file__).with_name("own_model_vllm.py")
    inference = rb.InferenceEngine(str(folder), models={"TinyLM": f"{place}:VllmTinyLM"}, max_model_len=LONGEST)
    inference.build()
    with rb.nn.device("meta"):
        module = TrainedLM(str(folder))
    train = rb.TrainEngine(module)
    train.build(tensor_parallel_size=2, colocate_with=inference)
    for iteration in range(iterations):
        rollouts = inference.generate(["sort 52143"], n=128, max_tokens=16, ignore_eos=True, progress=False)
        tokens = [[*group.prompt_token_ids, *output.token_ids] for group in rollouts for output in group.outputs]
        rewards = [sum(map(str.isdigit, output.text)) / 16 for group in rollouts for output in group.outputs]
        mean = sum(rewards) / len(rewards)
        advantages = [reward - mean for reward in rewards]
        train.reinforce(NeedParallel(tokens), NeedParallel(advantages), len(rollouts[0].prompt_token_ids))
        train.optimizer_step()
        synced = train.p2p_weight_sync(inference)
        print(
            f"iteration {iteration}: reward {mean:.3f}, log-probs after the sync apart by {synced.gap:.7f}", flush=True
        )
    rb.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=12)
    with tempfile.TemporaryDirectory() as made:
        main(parser.parse_args().iterations, Path(made))
