"""A forward or backward that fails on one rank still issues the collectives its peers wait for, so that they can vote.

A sharded module gathers each of its parts when it comes to them, and reduces their gradients on the way back: who
raises in between leaves its peers in a collective that nothing but the end of a process ends. But what a pass asks of
the ranks depends on no rank's data. So it is noted while a pass runs; one that fails issues the rest of what the last
whole one did: it gives its true weights, so that its peers compute what they would have, and zeros for gradients,
which are cleared wherever the failure is voted on.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlbench.errors import RLBenchError
from rlbench.strategies.control import issued_collectives
from rlbench.strategies.memory_side import reshard
from rlbench.user_code import user_code

FORWARD, BACKWARD = "forward", "backward"
_LEFT = "rlbench_peers_wait"


@contextmanager
def whole_pass(module: nn.Module, kind: str) -> Iterator[None]:
    """Around what one forward or backward of `module` does, with all that may fail on one rank alone.

    Args:
        module: whose pass it is, sharded or not.
        kind: `FORWARD` or `BACKWARD`.

    An exception leaves it with the collectives issued and the parameters sharded; `votable` says where that was not
    possible: no pass of the kind was seen whole before, or such passes have collectives that are not the sharding's.
    """
    ledger = _Ledger.of(module)
    if ledger is None:
        with user_code():
            yield
        return
    key = (kind, *(group.is_unsharded for group in ledger.groups))
    ledger.noted, ledger.broken = [], False
    before = issued_collectives()
    try:
        ledger.noting = True
        with user_code():
            yield
    except Exception as error:
        ledger.noting = False
        if not ledger.completed(module, key, issued_collectives() - before, error):
            error.__dict__[_LEFT] = True
        raise
    finally:
        ledger.noting = False
    ledger.keep(key, issued_collectives() - before)


def votable(error: Exception) -> Exception:
    """The failure of a pass, to be voted on; raises it where the peers still wait in the pass and would not vote."""
    if error.__dict__.get(_LEFT):
        raise error
    return error


@contextmanager
def unvotable(module: nn.Module) -> Iterator[None]:
    """Around passes that are outside of any `whole_pass`, or several in one vote: what fails there on one rank leaves
    its peers in a collective. What we refuse ourselves is found alike on all ranks, and is voted on."""
    try:
        with user_code():
            yield
    except RLBenchError:
        raise
    except Exception as error:
        if _Ledger.of(module) is not None:
            error.__dict__[_LEFT] = True
        raise


@dataclass(frozen=True)
class _Gather:
    """All ranks gather a group of parameters."""

    group: Any

    def again(self) -> None:
        self.group.unshard()
        self.group.wait_for_unshard()
        self.group.reshard()


@dataclass(frozen=True)
class _Reduce:
    """All ranks add up gradients, `given` numbers, of which each keeps `taken`."""

    comm: Any = field(compare=False)
    process_group: Any = field(compare=False)
    op: Any = field(compare=False)
    given: int
    taken: int
    dtype: torch.dtype
    device: torch.device

    def again(self) -> None:
        given = torch.zeros(self.given, dtype=self.dtype, device=self.device)
        taken = torch.empty(self.taken, dtype=self.dtype, device=self.device)
        self.comm(output_tensor=taken, input_tensor=given, group=self.process_group, op=self.op)


class _Ledger:
    """What the passes of one module ask of all ranks, in order. It lives on the module's groups of parameters.

    `noting`: a pass runs. `noted`: by it. `broken`: a collective of it has failed, so that none can be completed.
    """

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups
        self.noted: list[_Gather | _Reduce] = []
        self.noting = self.broken = False
        self._known: dict[tuple[Any, ...], list[list[_Gather | _Reduce]]] = {}
        self._unknowable: set[tuple[Any, ...]] = set()
        for group in groups:
            group._all_gather_comm = _Noting(group._all_gather_comm, self, group)
            group._reduce_scatter_comm = _Noting(group._reduce_scatter_comm, self, None)

    @classmethod
    def of(cls, module: nn.Module) -> _Ledger | None:
        """The module's; None where it is not sharded."""
        groups = [
            group
            for part in module.modules()
            if isinstance(part, FSDPModule)
            for group in part._get_fsdp_state()._fsdp_param_groups
        ]
        if not groups:
            return None
        comm = groups[0]._all_gather_comm
        return comm.ledger if isinstance(comm, _Noting) and comm.ledger.groups == groups else cls(groups)

    def keep(self, key: tuple[Any, ...], issued: int) -> None:
        """A pass was whole; one that asks for more than is noted could not be completed."""
        if issued != len(self.noted):
            self._unknowable.add(key)
        elif self.noted not in self._known.setdefault(key, []):
            self._known[key].append(self.noted)

    def completed(self, module: nn.Module, key: tuple[Any, ...], issued: int, error: Exception) -> bool:
        """Issue what is left of a pass that raised `error`; False where that cannot be done."""
        done = list(self.noted)
        fitting = [whole for whole in self._known.get(key, ()) if whole[: len(done)] == done]
        if len(fitting) != 1 or self.broken or issued != len(done) or key in self._unknowable:
            return False
        traceback.clear_frames(error.__traceback__)  # what the pass held: perhaps the memory it lacked
        reshard(module)
        _forget_unreduced(self.groups)
        try:
            for step in fitting[0][len(done) :]:
                step.again()
        except Exception as further:
            error.add_note(f"(the pass could not be completed for the other ranks: {further})")
            return False
        return True


def _forget_unreduced(groups: list[Any]) -> None:
    """Drop the gradients that a backward left on gathered parameters: the next one would add to them."""
    for group in groups:
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
            parameter.unsharded_accumulated_grad = None


class _Noting:
    """A communication of FSDP's that is noted when it is issued."""

    def __init__(self, comm: Any, ledger: _Ledger, gathered: Any) -> None:
        self._comm, self.ledger, self._gathered = comm, ledger, gathered

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As FSDP's own."""
        buffer: torch.Tensor = self._comm.allocate(*args, **kwargs)
        return buffer

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any) -> Any:
        if self.ledger.noting:
            self.ledger.noted.append(self._step(output_tensor, input_tensor, group, options.get("op")))
        try:
            return self._comm(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options)
        except Exception:
            self.ledger.broken = True
            raise

    def _step(self, taken: torch.Tensor, given: torch.Tensor, group: Any, op: Any) -> _Gather | _Reduce:
        if self._gathered is not None:
            return _Gather(self._gathered)
        return _Reduce(self._comm, group, op, given.numel(), taken.numel(), given.dtype, given.device)
