"""What torch's gradient hooks are registered with: settings, residuals, and the communicator, made when first used.

torch keeps a hook's state beside the model and may pickle it with the model. A process group cannot be pickled, so a
state leaves it behind, and asks for it again where it was not the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from zcomm.collectives.communicator import Communicator
from zcomm.collectives.feedback import Feedback
from zcomm.collectives.stats import Stats
from zcomm.errors import BufferError, GroupError, PlanError, TopologyError
from zcomm.keywords import known_keywords
from zcomm.plan import Plan, plan_of
from zcomm.topology import Topology
from zcomm.transports.torch_dist import device_in, process_group
from zcomm.wire.codec import Codec

_RESIDUALS = "residuals"  # the only key of a saved state


@known_keywords
class HookState:
    """Settings and residuals of one model's gradient hook.

    All ranks make it alike, over the group that the model averages over.
    """

    def __init__(
        self,
        codec: Plan | Codec | str | None = None,  # None: the plan's, which is int8 if no plan is given
        group: Any = None,  # the model's process group, or a one-dimensional mesh; None: the default group
        plan: Plan | None = None,  # all other settings
        topology: Topology | None = None,  # None: detected
        feedback: bool | Feedback = False,  # True: Feedback(), the plain form
    ) -> None:
        if isinstance(codec, Plan):
            plan, codec = codec, None
        if plan is not None and not isinstance(plan, Plan):
            raise PlanError(f"plan must be a zcomm.Plan or None, got {plan!r}; a codec goes first: State({plan!r})")
        if topology is not None and not isinstance(topology, Topology):
            raise TopologyError(f"topology must be a zcomm.Topology or None, got {topology!r}")
        if plan is None:
            self.plan = plan_of("int8" if codec is None else codec)
        else:
            self.plan = plan if codec is None else replace(plan, codec=codec)
        self.topology = topology
        if not isinstance(feedback, bool | Feedback):
            raise BufferError(f"feedback must be True, False or a zcomm.Feedback, got {feedback!r}")
        self.feedback = Feedback() if feedback is True else feedback or None
        self._group = group
        self._group_is_lost = False
        self._communicator: Communicator | None = None
        if dist.is_available() and dist.is_initialized():
            size = process_group(group).size()
            if topology is not None:
                topology.check_size(size)

    @property
    def group(self) -> Any:
        """The group that gradients are averaged over, as it was given. May be set until the first backward."""
        return self._group

    @group.setter
    def group(self, group: Any) -> None:
        if self._communicator is not None:
            raise GroupError("the group is in use since the first backward; make a new state for another group")
        self._group = group
        self._group_is_lost = False

    @property
    def communicator(self) -> Communicator:
        """The communicator over the group; before the first hook one for tensors on the group's own device."""
        return self.communicator_for(None)

    def communicator_for(
        self,
        gradient: torch.Tensor | None,  # the first one settles on which device of the group
    ) -> Communicator:
        """The communicator over the group, made where there is none yet, which is collective."""
        if self._communicator is None:
            if self._group_is_lost:
                raise GroupError(
                    "this state was pickled, and a pickle holds no process group; "
                    "set state.group to the model's group before the first backward"
                )
            group = process_group(self._group)
            device = device_in(group, None if gradient is None else gradient.device)
            self._communicator = Communicator(group, self.plan, self.topology, device)
        return self._communicator

    def stats(self) -> Stats:
        """Calls, bytes and seconds on this rank so far."""
        return {} if self._communicator is None else self._communicator.stats()

    def reset_stats(self) -> None:
        """Count anew from here."""
        if self._communicator is not None:
            self._communicator.reset_stats()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals as tensors in one tuple, beside model and optimizer. Save it on every rank.

        For torch.save, and for torch.distributed.checkpoint, which takes apart mappings but no tuples, and loads what
        the program that loads has a place for: a new state has one for the tuple, but none for each residual.
        """
        if self.feedback is None:
            return {}
        return {
            _RESIDUALS: (
                {
                    key: saved | {"parts": {name: torch.from_numpy(part) for name, part in saved["parts"].items()}}
                    for key, saved in self.feedback.state_dict().items()
                },
            )
        }

    def load_state_dict(
        self,
        state: dict[str, Any],  # as state_dict() gave it; {}: no residuals
    ) -> None:
        """Take this rank's residuals back."""
        if self.feedback is None:
            if state:
                raise BufferError("the state holds residuals, but feedback is off here; make the State with feedback=")
            return
        whole = state.get(_RESIDUALS, state) if isinstance(state, Mapping) else state
        self.feedback.load_state_dict(whole[0] if isinstance(whole, tuple) and len(whole) == 1 else whole)

    def __getstate__(self) -> dict[str, Any]:
        kept = self.__dict__.copy()
        kept["_group_is_lost"] = self._group_is_lost or self._group is not None
        kept["_group"] = kept["_communicator"] = None
        return kept

    def __repr__(self) -> str:
        return f"{type(self).__module__.rpartition('.')[2]}.{type(self).__name__}({self.plan})"
