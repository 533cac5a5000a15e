"""The last step before building: plugins speak, and the job is checked as a whole."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_qwen3_trn import assets
from torchtitan_qwen3_trn.checks.checkpoints import check_loaded_model
from torchtitan_qwen3_trn.checks.optimizer import check_groups_against_model
from torchtitan_qwen3_trn.checks.settings import check_config, data_parallel_degree, impossible_numbers
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hooks import Machine, NodeOverride
from torchtitan_qwen3_trn.job.configuration import is_rank_zero
from torchtitan_qwen3_trn.plugins import ActivePlugins, PluginError, choose, load

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.trainer import PluginTrainer

logger = logging.getLogger(__name__)

# Test assets of torchtitan's repository, which its wheel does not carry; ours stand in for them.
STOCK_TOKENIZER = "tests/assets/tokenizer"
STOCK_TEXT = "tests/assets/c4_test"


def prepare(
    config: PluginTrainer.Config, *, earlier: list[Problem] | None = None, source: str = "job"
) -> ActivePlugins:
    """Complete ``config`` in place: model, overrides, defaults that depend on them; then check it.

    ``earlier`` are problems found while reading the job file; they are reported together with what is found here.
    Does nothing but load the plugins when ``config`` was prepared before.

    Raises:
        JobError: with every problem found.
    """
    problems = list(earlier or [])
    plugins, plugin_problems = active_plugins(config)
    problems += [problem for problem in plugin_problems if problem not in problems]
    if config.prepared:
        _stop_on(problems, source)
        return plugins
    if numbers := list(impossible_numbers(config)):
        _stop_on([*problems, *numbers], source)
    machine = this_machine(config)
    problems += [*_launch_problems(config), *_absent_accelerator(config, machine)]
    use_bundled_assets(config)
    problems += check_config(config, machine, known={problem.where for problem in problems})
    _accumulate_gradients(config, machine)
    try:
        problems += _ask_plugins(config, plugins, machine, some_missing=bool(plugin_problems))
        problems += [*check_groups_against_model(config), *check_loaded_model(config)] if not problems else []
    except JobError as error:
        problems += error.problems
    except PluginError as error:
        problems.append(error.problem)
    _stop_on(problems, source)
    config.prepared = True
    return plugins


def active_plugins(config: PluginTrainer.Config) -> tuple[ActivePlugins, list[Problem]]:
    """Load the plugins that ``config`` enables."""
    chosen, problems = choose(config.model.backend, config.plugins.enable, config.plugins.disable)
    plugins, load_problems = load(chosen)
    return plugins, problems + load_problems


def this_machine(config: PluginTrainer.Config) -> Machine:
    """Device and number of ranks, from the launcher's environment (``NGPU`` when the ranks are simulated)."""
    from torchtitan.tools import utils

    ranks = os.environ.get("NGPU" if _is_simulated(config) else "WORLD_SIZE", "1")
    return Machine(device_type=utils.device_type, world_size=int(ranks) if _is_count(ranks) else 1)


def _launch_problems(config: PluginTrainer.Config) -> list[Problem]:
    """What the environment says of ranks and is no number: torchtitan reads it when folders and logs exist already."""
    ranks = "NGPU" if _is_simulated(config) else "WORLD_SIZE"
    problems = [
        Problem(name, f"{value!r} is not {what}", f"set this environment variable to {least} or more, or use torchrun")
        for name, what, least in ((ranks, "a number of ranks", 1), ("RANK", "a rank", 0), ("LOCAL_RANK", "a rank", 0))
        if not ((value := os.environ.get(name, "1")).isdecimal() and int(value) >= least)
    ]
    if _is_simulated(config) and "NGPU" not in os.environ:
        what = f"is not set, and comm.mode = {config.comm.mode!r} simulates that many ranks"
        problems.append(Problem("NGPU", what, "set this environment variable, for instance NGPU=64"))
    return problems


def _is_simulated(config: PluginTrainer.Config) -> bool:
    return config.comm.mode in ("fake_backend", "local_tensor")


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _absent_accelerator(config: PluginTrainer.Config, machine: Machine) -> list[Problem]:
    """A host made for an accelerator on which none answers must not train the small CPU profile instead."""
    if machine.device_type != "cpu" or config.job.profile != "auto" or _is_simulated(config):
        return []
    signs = {
        "torch-neuronx is installed": importlib.util.find_spec("torch_neuronx") is not None,
        "/dev/neuron0 exists": Path("/dev/neuron0").exists(),
        "/dev/nvidia0 exists": Path("/dev/nvidia0").exists(),
    }
    seen = [sign for sign, present in signs.items() if present]
    if not seen:
        return []
    what = f"{seen[0]}, but torch finds no accelerator"
    fix = "check the driver and that the back end of torch loads; --job.profile cpu runs on the CPU all the same"
    return [Problem("device", what, fix)]


def use_bundled_assets(config: PluginTrainer.Config) -> None:
    """Point stock's test tokenizer and ``c4_test`` text to the bundled ones where stock's paths do not exist."""
    assets_path = Path(config.hf_assets_path)
    if assets_path == Path(STOCK_TOKENIZER) and not assets_path.exists():
        config.hf_assets_path = str(assets.tokenizer_path())
        _log(f"{assets_path} does not exist here: using the bundled tokenizer in {config.hf_assets_path}")
    if Path(STOCK_TEXT).exists():
        return
    loaders = (config.dataloader, config.validator.dataloader)
    sources = [source for loader in loaders for source in getattr(loader, "sources", None) or [loader]]
    without_path = [each for each in sources if each.dataset.lower() == "c4_test" and each.dataset_path is None]
    for source in without_path:
        source.dataset_path = str(assets.text_path())
    if without_path:
        _log(f"{STOCK_TEXT} does not exist here: using the bundled text in {assets.text_path()}")


def _accumulate_gradients(config: PluginTrainer.Config, machine: Machine) -> None:
    steps, training = config.job.gradient_accumulation_steps, config.training
    if steps and training.global_batch_size == -1:
        training.global_batch_size = steps * training.local_batch_size * data_parallel_degree(config, machine)


def _ask_plugins(
    config: PluginTrainer.Config, plugins: ActivePlugins, machine: Machine, *, some_missing: bool
) -> list[Problem]:
    """Let the plugins complete ``config`` and check it; ``some_missing`` was reported, and so is not what follows."""
    plugins.call("adjust_config", config=config, machine=machine)
    if not _choose_model(config, plugins):
        what = f"none of the enabled plugins {plugins.names} offers a model for it"
        missing = Problem(f"model.backend = {config.model.backend!r}", what, "enable one that does")
        return [] if some_missing else [missing]
    problems, outcome = _plan_overrides(config, plugins, machine)
    if not problems and not some_missing:
        problems = _attention_without_backward(outcome, machine)
    checked, failures = plugins.call_each("check_job", Problem, config=config, machine=machine)
    return [*problems, *failures, *(problem for _, found in checked for problem in found)]


def _choose_model(config: PluginTrainer.Config, plugins: ActivePlugins) -> bool:
    """Take the model of the plugin that has one for this job; whether there is any."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.protocols.model_spec import ModelSpec

    if config.model_spec is None:
        config.model_spec = plugins.call("model_spec", config=config)
    if config.model_spec is None:
        return False
    if not isinstance(config.model_spec, ModelSpec):
        what = f"a plugin gave {config.model_spec!r:.80} as the model, which is no ModelSpec of torchtitan"
        raise JobError([Problem("plugins", what, f"the plugins asked are {plugins.names}")])
    cross_entropy = config.loss.loss_fn if isinstance(config.loss, ChunkedLossWrapper.Config) else config.loss
    if isinstance(cross_entropy, CrossEntropyLoss.Config) and cross_entropy.global_vocab_size is None:
        cross_entropy.global_vocab_size = getattr(config.model_spec.model, "vocab_size", None)
    return True


def _plan_overrides(
    config: PluginTrainer.Config, plugins: ActivePlugins, machine: Machine
) -> tuple[list[Problem], PluginTrainer.Config]:
    """Register the overrides that plugins ask for; what is wrong with them, and what they make of ``config``."""
    from torchtitan_qwen3_trn.job import override_plan as registration

    asked, problems = plugins.call_each("node_overrides", NodeOverride, config=config, machine=machine)
    requests = [
        registration.Request(str(plugin.installed), plugin.installed.name, wanted)
        for plugin, overrides in asked
        for wanted in overrides
    ]
    problems += registration.check_requests(requests, config)
    if problems:
        return problems, config
    names = registration.register(requests)
    config.override.imports = [*config.override.imports, *(entry for entry, _ in names)]
    outcome, counts, problems = registration.try_out(config)
    plugin_of = {registration.target_of(entry): plugin for entry, plugin in names}
    for target, count in counts.items():
        name = plugin_of.get(target, target)
        config.planned_overrides[name] = config.planned_overrides.get(name, 0) + count
    return problems, outcome


def _attention_without_backward(outcome: PluginTrainer.Config, machine: Machine) -> list[Problem]:
    from torchtitan.models.common.attention import FlexAttention

    left = [fqn for fqn, _, _, _ in outcome.traverse(FlexAttention.Config)]
    if machine.device_type != "cpu" or not left:
        return []
    what = f"{len(left)} attention layers stay on FlexAttention, which has no backward pass on the CPU"
    return [Problem("plugins", what, "enable sdpa for all layers")]


def _stop_on(problems: list[Problem], source: str) -> None:
    if problems:
        raise JobError(dict.fromkeys(problems), source)


def _log(text: str) -> None:
    if is_rank_zero():
        logger.info(text)
