"""What a completion meets: environments and tools, turn by turn. See `rlbench.envs.protocol` for how to write one."""

from rlbench.envs.hook import IndexedGenerationHistory, from_hook
from rlbench.envs.openenv import from_openenv
from rlbench.envs.protocol import Env, Step, Turn
from rlbench.envs.tools import ToolCall, ToolEnv, find_calls, tools

__all__ = [
    "Env",
    "IndexedGenerationHistory",
    "Step",
    "ToolCall",
    "ToolEnv",
    "Turn",
    "find_calls",
    "from_hook",
    "from_openenv",
    "tools",
]
