"""What a completion meets: environments and tools, turn by turn. See `rlbench.envs.protocol` for how to write one."""

from rlbench.envs.hook import IndexedGenerationHistory, from_hook
from rlbench.envs.mcp_tools import mcp
from rlbench.envs.openenv import from_openenv
from rlbench.envs.policy import Policy
from rlbench.envs.protocol import Appended, Env, Step, Turn
from rlbench.envs.sandbox import sandbox
from rlbench.envs.tools import ToolCall, ToolEnv, ToolUnavailable, find_calls, tools
from rlbench.envs.trl_env import from_trl
from rlbench.envs.verifiers_env import VerifiersEnv, VerifiersError, from_verifiers

__all__ = [
    "Appended",
    "Env",
    "IndexedGenerationHistory",
    "Policy",
    "Step",
    "ToolCall",
    "ToolEnv",
    "ToolUnavailable",
    "Turn",
    "VerifiersEnv",
    "VerifiersError",
    "find_calls",
    "from_hook",
    "from_openenv",
    "from_trl",
    "from_verifiers",
    "mcp",
    "sandbox",
    "tools",
]
