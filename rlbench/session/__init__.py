"""The workbench: one object, one verb per cell."""

from rlbench.session.options import Inference, Train
from rlbench.session.reward_model import RewardModel
from rlbench.session.session import Session, attach, sessions
from rlbench.session.setup_options import EMA, every
from rlbench.trainers.models.lora import Lora

__all__ = ["EMA", "Inference", "Lora", "RewardModel", "Session", "Train", "attach", "every", "sessions"]
