"""Weight packing, shared by plans, tuning and measurements.

With constant weights, as in inference, the steps that depend on weights alone run once, in `bind`; calls run the other
steps, which read weights without waiting for the previous launch. With changing weights, as in training, every call
runs all steps. In both cases the next launch may start early (programmatic dependent launch).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.device.recipe import Recipe
from escalade.device.run import Executable, TwinOptions


class PreparedRecipe:
    """Recipe prepared for repeated calls on one device."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        label: str = "",
        *,
        weights_are_constant: bool,
        behind: Recipe | None = None,
        options: TwinOptions = TwinOptions(),
    ) -> None:
        """Prepare it. `behind` is the recipe launched next; measurements launch the same one again."""
        self._recipe = recipe
        self._device = device
        self._label = label
        self._options = options
        self.packs = weights_are_constant and bool(recipe.packing.steps)
        """True if there are packing steps to run once."""
        comes_early = behind is not None and (
            behind.launches_early_after_packing if weights_are_constant else behind.launches_early
        )
        self.executable = Executable(
            recipe.after_packing if weights_are_constant else recipe,
            device,
            label,
            options=options,
            weights_ready=weights_are_constant,
            release_dependents=comes_early,
        )
        """The steps of every call, over the tensors returned by `pack`."""

    def pack(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """Pack the weights; returns the tensors and newly allocated workspaces."""
        complete = dict(tensors)
        for workspace in self._recipe.workspaces:
            if workspace.name not in complete:
                complete[workspace.name] = workspace.allocate(self._device)
        if self.packs:
            run_packing(self._recipe, self._device, self._label, complete, self._options)
        return complete

    def bind(self, tensors: Mapping[str, torch.Tensor | None]) -> Executable:
        """Pack the weights, on the current stream, and bind the steps of every call to these tensors."""
        return self.executable.bind(self.pack(tensors))


def run_packing(
    recipe: Recipe,
    device: torch.device,
    label: str,
    tensors: Mapping[str, torch.Tensor | None],
    options: TwinOptions = TwinOptions(),
) -> None:
    """Run the steps that depend on weights alone, on the current stream."""
    Executable(recipe.packing, device, label, options=options).bind(tensors)()
