"""The contract every plugin writes against.

A plugin is a module named by an entry point of the group ``torchtitan.plugins``. It defines any of the functions
below, marked with ``@hookimpl``, and may define a dataclass called ``Options`` whose fields are what a job file can
set under ``[plugins.<name>]``. An implementation takes the arguments it needs, by name; it may leave out the others.

An implementation that raises before training starts ends the job with one message that names plugin, hook, exception
and line; in training the exception comes with its traceback.

``config`` is always the job's :class:`~torchtitan_qwen3_trn.trainer.PluginTrainer.Config`; a plugin finds its own
options with ``config.plugins.options(Options)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch
    from torchtitan.config import Configurable
    from torchtitan.protocols.model_spec import ModelSpec

    from torchtitan_qwen3_trn.errors import Problem
    from torchtitan_qwen3_trn.trainer import PluginTrainer

PROJECT = "torchtitan"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, kw_only=True)
class NodeOverride:
    """A request to replace nodes of the configuration tree, handed to ``torchtitan.config.override``.

    Attributes:
        target: config class to replace; its subclasses match too.
        factory: module-level function ``factory(config, **kwargs) -> replacement config``. Use
            ``torchtitan.config.override.derive`` so that sharding and initialisation survive.
        fqns: module names, with ``*`` as wildcard, such as ``layers.0.*``. ``None`` takes every node.
        kwargs: passed to ``factory``.
    """

    target: type[Configurable.Config]
    factory: Callable[..., Configurable.Config]
    fqns: list[str] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the job is about to run.

    Attributes:
        device_type: ``cpu``, ``cuda`` or ``neuron``, as torchtitan detected it.
        world_size: ranks of the job; the simulated number under ``comm.mode = "fake_backend"``.
    """

    device_type: str
    world_size: int


@hookspec
def adjust_config(config: PluginTrainer.Config, machine: Machine) -> None:
    """Change the job's configuration before anything reads it.

    Called once on every rank, first of all hooks, after job file, profile and command line are merged. ``config``
    may be mutated, except ``config.plugins``. Log what you change. The same result must come out on every rank.
    """


@hookspec(firstresult=True)
def model_spec(config: PluginTrainer.Config) -> ModelSpec | None:
    """Give the model of this job, or ``None`` when ``config.model.backend`` is not yours.

    Called once on every rank after ``adjust_config``, on the plugin enabled last first, so that yours can take the
    place of a route's; the first result that is not ``None`` wins and becomes ``config.model_spec``. Build
    configurations only, no tensors. ``config`` must not be changed. Raise
    :class:`~torchtitan_qwen3_trn.errors.JobError` for what the user has to correct.
    """


@hookspec
def node_overrides(config: PluginTrainer.Config, machine: Machine) -> list[NodeOverride]:
    """Name the nodes of the configuration tree to replace, and with what.

    Called once on every rank after ``model_spec``; ``config.model_spec`` is set, its sharding is not. Nothing may be
    mutated: torchtitan applies the replacements when the trainer is built and logs one ``[Override]`` line per node.
    Two plugins that claim one node, and a pattern in ``fqns`` that matches none, end the job with a message.
    """


@hookspec
def check_job(config: PluginTrainer.Config, machine: Machine) -> list[Problem]:
    """Report everything that would make the job fail or give wrong numbers on this machine.

    Called once on every rank after ``node_overrides``, before a process group, a folder or a tensor exists. Nothing
    may be mutated. All problems of all plugins are shown together and end the job with exit status 2.
    """


@hookspec
def model_inputs(config: PluginTrainer.Config, inputs: torch.Tensor, extra_kwargs: dict[str, Any]) -> None:
    """Add keyword arguments to the model's forward call.

    Called for every microbatch, in training and validation, on every rank, after the batch is on the device and
    before the forward pass. ``inputs`` are token ids ``[B, L]``, int64; ``extra_kwargs`` may be mutated and holds
    ``positions`` ``[B, L]``, int64, which restart at 0 with each packed document. Under pipeline parallelism the
    arguments reach every stage. Must not synchronise with the host.
    """


@hookspec
def after_step(trainer: PluginTrainer, step: int) -> None:
    """Look at the trainer after an optimizer step.

    Called on every rank after each step, before a checkpoint is taken. ``step`` counts from 1. Collectives are
    allowed if every rank calls them; parameters must not be changed.
    """


@hookspec
def checkpoint_saved(trainer: PluginTrainer, step: int) -> None:
    """Act on a checkpoint of ``step``.

    Called on every rank after ``CheckpointManager`` wrote it, or with ``checkpoint.async_mode`` after it was staged.
    The trainer must not be changed.
    """


@hookspec
def training_ended(trainer: PluginTrainer) -> None:
    """Finish: export, verify, report.

    Called once on every rank after the last step and its checkpoint, while the process group still exists. Not
    called when training raised. An exception fails the job.
    """
