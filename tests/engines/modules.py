"""A custom model that is not from Hugging Face, as a user would write it."""

import torch
import torch.nn.functional as F

from rlbench.nn import Fsdp2TrainModule, FsdpTrainModule


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Fits:
    """Fits y = 2x; its weights come from initialisers. What a user writes, whichever FSDP holds it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(2))
        self.head = torch.nn.Linear(width, 1)

    @property
    def non_split_modules(self):
        return {Block}

    def materialization_source(self):
        generator = torch.Generator().manual_seed(0)
        return {
            name: (lambda t, g=generator: t.copy_(torch.randn(t.shape, generator=g) * 0.1))
            for name, _ in self.named_parameters()
        }

    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        self.seen = 0

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def train_step(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> float:
        """One backward on these rows; returns the loss."""
        self.seen += len(x)
        loss = F.mse_loss(self(x), y) * scale
        loss.backward()
        return loss.item()

    def optimizer_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def where(self):
        return self.rank, self.world_size, str(self.device), self.seen

    def rows(self, data):
        return list(data)

    def say(self, text):
        print(text)

    def forgets_to_call(self, x):
        return self.forward(x).sum().item()

    def fails(self):
        raise KeyError("missing field")

    def fails_on_rank_one(self):
        if self.rank == 1:
            raise ValueError("rank one has had enough")
        return self.rank

    @property
    def not_a_method(self):
        return 1

    def _private(self):
        return None


class Regressor(Fits, Fsdp2TrainModule):
    pass


class FlatRegressor(Fits, FsdpTrainModule):
    pass
