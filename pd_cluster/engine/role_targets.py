"""What the role of a node changes in its engine: how much of a step prompts may take beside decodes."""

from __future__ import annotations

from copy import deepcopy
from math import inf
from typing import TYPE_CHECKING

from pd_cluster.scheduling.step_model import StepModel
from pd_cluster.scheduling.targets import Targets

if TYPE_CHECKING:
    from pd_cluster.scheduling.step_budget import StepBudget
    from pd_cluster.scheduling.stream_room import StreamRoom
    from pd_cluster.worker.executor import ModelDescription


class RoleTargets:
    """Sets the targets of `budget`, and the gaps of `room`, as a role has them.

    `targets`: those that the node's settings name. `step_model`: what the engine's steps taught so far. `model`: has
    the times of steps that were measured at start.
    """

    def __init__(
        self, targets: Targets, budget: StepBudget, room: StreamRoom, step_model: StepModel, model: ModelDescription
    ) -> None:
        self._targets, self._budget, self._room = targets, budget, room
        self._step_model, self._model = step_model, model

    def take(self, role: str) -> None:
        """A prefill node's prompts come first: its streams wait for a step as long as the target of gaps allows.

        What no client asks for is decided on a decode node by the steps at start. One that measured none and has taken
        the role by order goes by the steps that it has had, if it knows them: 8B's are not its own. A prefill node
        keeps no stream before its steps are known, and none on a CPU, where each token of a stream takes as long as one
        of a prompt.
        """
        self._room.prompts_first = role == "prefill"
        budget, model = self._budget, self._model
        is_live = self._targets != Targets(self._targets.ttft_s) or role == "prefill"
        has_own = not model.step_times and self._step_model.knows_prompts
        of_start = deepcopy(self._step_model) if has_own else StepModel(model.step_times)
        budget.model = self._step_model if is_live else of_start
        budget.targets = self._targets.on(role, model.device, budget.model, model.spec.keys_per_token)
        self._room.gap_s = inf if model.device == "cpu" else budget.targets.itl_s
