"""Weights packed once, then run: the one rule for plans, for tuning and for measurements.

Where weights stay, as in a network, the steps of a recipe that depend on nothing else are run when its tensors are
named; every call does the others, which take weights for ready. Where weights change from call to call, as in training,
every call does all steps and waits for whoever wrote them. Either lets the launch behind in early.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.device.recipe import Recipe
from escalade.device.run import Executable, TwinOptions


class PreparedRecipe:
    """A recipe made ready for one device, to be called again and again."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        label: str = "",
        *,
        weights_stay: bool,
        behind: Recipe | None = None,
        options: TwinOptions = TwinOptions(),
    ) -> None:
        """`behind` is the recipe that is launched next; a measurement launches the same one again."""
        self._recipe = recipe
        self._device = device
        self._label = label
        self._options = options
        self.packs = weights_stay and bool(recipe.packing.steps)
        """Whether there is anything to be done once."""
        comes_early = behind is not None and (
            behind.launches_early_after_packing if weights_stay else behind.launches_early
        )
        self.executable = Executable(
            recipe.after_packing if weights_stay else recipe,
            device,
            label,
            options=options,
            weights_ready=weights_stay,
            release_dependents=comes_early,
        )
        """What every call does, over tensors that `pack` has made complete."""

    def pack(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """These tensors and workspaces for those that are not among them, weights packed into them."""
        complete = dict(tensors)
        for workspace in self._recipe.workspaces:
            if workspace.name not in complete:
                complete[workspace.name] = workspace.allocate(self._device)
        if self.packs:
            Executable(self._recipe.packing, self._device, self._label, options=self._options).bind(
                complete
            )()
        return complete

    def bind(self, tensors: Mapping[str, torch.Tensor | None]) -> Executable:
        """What every call does, over these tensors: weights are packed when this returns, or will be on the stream."""
        return self.executable.bind(self.pack(tensors))
