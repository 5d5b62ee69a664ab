"""Mutants of training steps."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_UPDATE = "escalade/engine/training/update.py"
_STEP, _GROUPS = "escalade/engine/training/step.py", "escalade/engine/training/optimizers.py"
_FOLLOWED, _STANDING = (
    "escalade/engine/training/optimizer_state.py",
    "escalade/engine/training/change_guard.py",
)
_PLANNED, _RULES = "escalade/engine/training/planned.py", "escalade/ops/optimizer_step/rules.py"
_SCALE, _CHANGES, _STEPS = (
    (f"tests/engine/training/test_{name}.py",) for name in ("loss_scale", "changes", "step")
)
_RULE_TESTS = ("tests/ops/optimizer_step/test_optimizer_step.py",)

MUTANTS: tuple[Mutant, ...] = (
    # The loss scale
    Mutant(
        "training/scale-is-the-rules-default",
        _STEP,
        "            group.scale.copy_(scale)",
        "            pass",
        _SCALE,
    ),
    Mutant("training/growth-interval", _UPDATE, "2.0, 0.5, 2000", "2.0, 0.5, 200", _SCALE),
    Mutant("training/growth-not-restored", _STEP, "self._update.growth.fill_(steps)", "pass", _SCALE),
    Mutant(
        "training/growth-not-saved",
        _STEP,
        '"good_steps": float(self._update.growth)',
        '"good_steps": 0.0',
        _SCALE,
    ),
    Mutant(
        "training/scale-not-restored",
        _STEP,
        "self._scale.fill_(scale)",
        "self._scale.fill_(self._scale)",
        _SCALE,
    ),
    Mutant(
        "training/skips-counted-as-steps",
        _GROUPS,
        "self.progress[int(skips)] += 1",
        "self.progress[0] += 1",
        _SCALE,
    ),
    Mutant(
        "training/skipped-ever-shrinks-scale",
        _UPDATE,
        "groups[0].progress[2]",
        "groups[0].progress[1]",
        _SCALE,
    ),
    Mutant(
        "training/nan-skips-one-group", _GROUPS, "    if scaled and len(groups) > 1:", "    if False:", _SCALE
    ),
    Mutant(
        "training/nan-of-first-group-alone",
        _GROUPS,
        "for group in groups for one in group",
        "for group in groups[:1] for one in group",
        _SCALE,
    ),
    Mutant(
        "training/nan-written-to-a-copy",
        _GROUPS,
        "gradient[(0,) * gradient.dim()]",
        "gradient.flatten()[:1]",
        _SCALE,
    ),
    Mutant(
        "training/only-first-gradient-checked",
        _GROUPS,
        "isfinite().all()) for one in self.parameters)",
        "isfinite().all()) for one in self.parameters[:1])",
        ("tests/engine/training/test_step.py", *_SCALE),
    ),
    Mutant(
        "training/fp16-unscaled",
        _STEP,
        'if settings.dtype == "fp16" or loss_scale is not None',
        "if loss_scale is not None",
        ("tests/train/test_trainer.py::test_planned_steps_go_on_bit_for_bit_too",),
    ),
    Mutant(
        "training/empty-parameters-stepped",
        _GROUPS,
        "if one in types and one.numel():",
        "if one in types:",
        _SCALE,
    ),
    # The optimizer's settings and state
    Mutant(
        "training/sgd-settings-swapped",
        _GROUPS,
        'group["dampening"], group["weight_decay"]',
        'group["weight_decay"], group["dampening"]',
        _SCALE,
    ),
    Mutant(
        "training/adam-settings-swapped",
        _GROUPS,
        'betas, group["eps"], group["weight_decay"]',
        'betas, group["weight_decay"], group["eps"]',
        _SCALE,
    ),
    Mutant(
        "training/nesterov-change-not-seen",
        _GROUPS,
        '"weight_decay", "nesterov", "maximize"),',
        '"weight_decay", "maximize"),',
        _CHANGES,
    ),
    Mutant(
        "training/eps-change-not-seen",
        _GROUPS,
        '_ADAM_SETTINGS = ("lr", "betas", "eps",',
        '_ADAM_SETTINGS = ("lr", "betas",',
        _CHANGES,
    ),
    Mutant(
        "training/decoupled-not-read", _GROUPS, ' or bool(group.get("decoupled_weight_decay"))', "", _CHANGES
    ),
    Mutant(
        "training/old-formula-kept",
        _GROUPS,
        "if rule.expression != self._rule.expression:",
        "if False:",
        _CHANGES,
    ),
    Mutant(
        "training/moments-swapped",
        _GROUPS,
        '_ADAM_STATE = {"m": "exp_avg", "v": "exp_avg_sq",',
        '_ADAM_STATE = {"v": "exp_avg", "m": "exp_avg_sq",',
        _SCALE,
    ),
    Mutant(
        "training/amsgrad-state-name",
        _GROUPS,
        '_ADAM_STATE = {"m": "exp_avg", "v": "exp_avg_sq", "w": "max_exp_avg_sq"}',
        '_ADAM_STATE = {"m": "exp_avg", "v": "exp_avg_sq", "w": "exp_avg_sq_max"}',
        _SCALE,
    ),
    Mutant(
        "training/state-not-handed-over",
        _GROUPS,
        "                self._optimizer.state[parameter].update(made)",
        "                pass",
        _STEPS,
    ),
    Mutant(
        "training/state-of-skipped-steps-kept",
        _GROUPS,
        "            self._retract_state()",
        "            pass",
        _CHANGES,
    ),
    Mutant("training/count-off-by-one", _GROUPS, "count.fill_(taken)", "count.fill_(taken - 1)", _CHANGES),
    Mutant(
        "training/count-not-read-again", _STEP, "            group.read_count()", "            pass", _CHANGES
    ),
    Mutant(
        "training/loaded-state-ignored",
        _GROUPS,
        "if not all(map(operator.is_, [one.get(role) for one in own], tensors)):",
        "if None in [one.get(role) for one in own]:",
        _CHANGES,
    ),
    Mutant(
        "training/made-state-wins",
        _GROUPS,
        "return {**made, **{name: value for name, value in state.items() if value is not None}}",
        "return {**state, **made}",
        _CHANGES,
    ),
    Mutant(
        "training/counts-not-told",
        _FOLLOWED,
        "                group.write_count()",
        "                pass",
        _CHANGES,
    ),
    Mutant(
        "training/counts-mixed-in-a-group",
        _GROUPS,
        "by_steps.setdefault(_steps_taken(optimizer, one), {})",
        "by_steps.setdefault(0, {})",
        _CHANGES,
    ),
    Mutant(
        "training/schedules-not-told",
        _STEP,
        "self._optimizer._opt_called = True",
        "self._optimizer._opt_called = False",
        _STEPS,
    ),
    # Plans
    Mutant(
        "training/buffers-not-written",
        _PLANNED,
        "works += [self._buffer_updates.run, self._counters.run]",
        "works += [self._counters.run]",
        _STEPS,
    ),
    Mutant(
        "training/batches-not-counted",
        _PLANNED,
        "works += [self._buffer_updates.run, self._counters.run]",
        "works += [self._buffer_updates.run]",
        _STEPS,
    ),
    Mutant(
        "training/inputs-not-copied",
        _PLANNED,
        "        self._copy_inputs(inputs)\n        self.program.run()",
        "        self.program.run()",
        _STEPS,
    ),
    Mutant("training/loss-not-copied", _PLANNED, "return self._loss.clone()", "return self._loss", _STEPS),
    Mutant(
        "training/gradients-not-reduced",
        _PLANNED,
        "self._all_reduce = partial(reduce, flat)",
        "self._all_reduce = lambda: None",
        _STEPS,
    ),
    Mutant(
        "training/modes-of-now", _STEP, "self._modes.get(module, module.training)", "module.training", _STEPS
    ),
    Mutant(
        "training/oldest-plan-is-last",
        _STEP,
        "self._plans.pop(key, None) or",
        "self._plans.get(key) or",
        _STEPS,
    ),
    Mutant(
        "training/frozen-parameters-not-noticed",
        _STANDING,
        'attrgetter("requires_grad", "_backward_hooks",',
        'attrgetter("_backward_hooks",',
        _CHANGES,
    ),
    Mutant(
        "training/moved-parameters-not-noticed",
        _STANDING,
        "tensor.data_ptr(), tensor.shape",
        "tensor.shape",
        _CHANGES,
    ),
    Mutant(
        "training/loss-tensors-not-watched",
        _STANDING,
        "all([tensor._version == version for tensor, version in self._constants])",
        "True",
        _CHANGES,
    ),
    Mutant(
        "training/replaced-mappings-not-noticed",
        _GROUPS,
        "all(map(operator.is_, now.values(), self._each))",
        "True",
        _CHANGES,
    ),
    Mutant(
        "training/tensor-settings-taken-for-plain",
        _GROUPS,
        "if any(isinstance(one, torch.Tensor) for one in leaves):",
        "if False:",
        _CHANGES,
    ),
    Mutant(
        "training/lists-of-settings-shared",
        _GROUPS,
        "[list(value) if isinstance(value, list) else value for value in settings]",
        "settings",
        _CHANGES,
    ),
    # Rules
    Mutant("training/first-velocity-damped", _RULES, "where({STEP} > 1,", "where({STEP} > 0,", _RULE_TESTS),
    Mutant(
        "training/nesterov-of-old-velocity",
        _RULES,
        '"d + momentum * b" if',
        '"d + momentum * m" if',
        _RULE_TESTS,
    ),
    Mutant("training/amsgrad-minimum", _RULES, "maximum(w, s)", "minimum(w, s)", _RULE_TESTS),
    Mutant(
        "training/decoupled-decay-without-lr",
        _RULES,
        "(1 - lr * weight_decay)",
        "(1 - weight_decay)",
        _RULE_TESTS,
    ),
    Mutant(
        "training/eps-under-the-root",
        _RULES,
        "(sqrt({second}) * correction + eps)",
        "(sqrt({second} + eps) * correction)",
        _RULE_TESTS,
    ),
    Mutant(
        "training/maximize-decays-upwards",
        _RULES,
        "_decayed(_ascending(maximize), weight_decay)\n    values",
        '"-(" * maximize + _decayed(GRADIENT, weight_decay) + ")" * maximize\n    values',
        _SCALE,
    ),
    Mutant(
        "training/plans-of-parts-without-order",
        "escalade/engine/training/parts.py",
        "self._parts.pop(key) if key in self._parts",
        "self._parts[key] if key in self._parts",
        ("tests/engine/test_backend.py::test_the_least_recently_used_plan_of_a_part_is_evicted_first",),
    ),
    Mutant(
        "training/settings-of-modules-are-not-compared",
        "escalade/engine/training/change_guard.py",
        "            and self._settings_are_unchanged()\n",
        "",
        ("tests/engine/training/test_changes.py",),
    ),
    Mutant(
        "training/hooks-on-the-optimizer-later",
        "escalade/engine/training/change_guard.py",
        "            and self._hooks_are_unchanged()\n",
        "",
        ("tests/engine/training/test_refusals.py",),
    ),
)
