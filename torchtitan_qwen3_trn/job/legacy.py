"""Keys of torchtitan 0.2.x job files and of other published recipes, translated to torchtitan 0.3.

The 0.2.x schema is that of ``torchtitan/config/job_config.py`` at tags v0.2.0 to v0.2.2. Each key that moved is
translated with one warning. A key whose feature is gone is ignored with a warning when it asks for nothing, and is
an error when it asks for something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchtitan_qwen3_trn.errors import Problem, show

Table = dict[str, Any]


@dataclass(frozen=True)
class Gone:
    """A key whose feature does not exist any more.

    Attributes:
        nothing: values that ask for nothing, 0.2.x's default among them.
        why: what to do when it asks for something.
    """

    nothing: tuple[Any, ...]
    why: str


@dataclass
class Translation:
    """A job table in today's terms.

    Attributes:
        table: the translated table; the input is not changed.
        warnings: one per key that was translated or ignored.
        problems: keys that ask for what is gone, and keys given in both spellings.
    """

    table: Table
    warnings: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


_ONLY_FOR_CONVERTERS = "it only configures model.converters, which this job does not use"
_NO_QUANTIZE = "low-precision converters are CUDA-only and not part of this package; remove it"
_NO_FT = "fault tolerance is not part of torchtitan 0.3; remove it"

# Keys, and sections, which end with a dot.
MOVED: dict[str, str] = {
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "job.model_parallel_size": "parallelism.data_parallel_shard_degree",
    "job.enable_checkpoint": "checkpoint.enable",
    "job.checkpoint_folder": "checkpoint.folder",
    "profiling.": "profiler.",
    "model.tokenizer_path": "model.hf_assets_path",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "training.dataloader.": "dataloader.",
    "training.batch_size": "training.local_batch_size",
    "training.gradient_accumulation_steps": "job.gradient_accumulation_steps",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
    "validation.": "validator.",
}

GONE: dict[str, Gone] = {
    "job.custom_config_module": Gone(("",), "write a plugin instead (docs/plugins.md)"),
    "experimental.custom_import": Gone(("",), "write a plugin instead (docs/plugins.md)"),
    "experimental.custom_args_module": Gone(("",), "write a plugin instead (docs/plugins.md)"),
    "model.converters": Gone(([],), _NO_QUANTIZE),
    "model.print_after_conversion": Gone((False,), _NO_QUANTIZE),
    "model.name": Gone(("qwen3",), 'this package trains "qwen3"; another family needs a plugin and a route of its own'),
    "model.norm_type": Gone(("rmsnorm", "RMSNorm", "rms_norm"), "Qwen3 is defined with RMSNorm only"),
    "optimizer.early_step_in_backward": Gone((False,), "torchtitan 0.3 has no optimizer step in backward"),
    "training.enable_compiled_autograd": Gone((False,), "torchtitan 0.3 has no compiled autograd option"),
    "parallelism.enable_compiled_autograd": Gone((False,), "torchtitan 0.3 has no compiled autograd option"),
    "parallelism.disable_loss_parallel": Gone((False,), "loss parallel is always on with tensor parallelism"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Gone((True, False), "torchtitan 0.3 has no such switch"),
    "parallelism.context_parallel_rotate_method": Gone(("allgather",), "torchtitan 0.3 always uses all-gather"),
    "parallelism.expert_parallel_comm_backend": Gone(("standard",), "other dispatchers are CUDA-only"),
    "checkpoint.enable_ft_dataloader_checkpoints": Gone((True, False), _NO_FT),
    "activation_checkpoint.early_stop": Gone((False,), "torchtitan 0.3 always recomputes the whole block"),
    "memory_estimation.enable": Gone((False,), "use --comm.mode fake_backend for a rehearsal"),
    "memory_estimation.disable_fake_mode": Gone((False,), "use --comm.mode fake_backend for a rehearsal"),
    "fault_tolerance.enable": Gone((False,), _NO_FT),
}

# Sections of which nothing counts unless their key ``enable`` is true.
_SWITCHED_SECTIONS = ("fault_tolerance", "memory_estimation")
_SAME_AS_TRAINING = {"validation.local_batch_size": 8, "validation.seq_len": 2048}
"""Keys that torchtitan 0.3 shares with training, and their defaults in 0.2.x."""


def translate(table: Table) -> Translation:
    """``table`` in today's terms; see :class:`Translation`."""
    result = Translation(table={})
    for path, value in _leaves(table):
        special = _SPECIAL.get(path) or (_quantize if path.startswith("quantize.") else None)
        if special is not None:
            special(path, value, table, result)
        elif (moved := _moved(path)) is not None:
            _move(path, moved, value, table, result)
        elif path in GONE or _in_switched_off_section(path, table):
            _drop(path, value, GONE.get(path), result)
        else:
            _put(result, path, value)
    return result


def _moved(path: str) -> str | None:
    """The name that ``path`` has today, if it is another one."""
    if path in MOVED:
        return MOVED[path]
    sections = (name for name in MOVED if name.endswith(".") and path.startswith(name))
    return next((MOVED[name] + path.removeprefix(name) for name in sections), None)


def _leaves(table: Table, where: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values; an empty table counts as a value."""
    for key, value in table.items():
        path = f"{where}.{key}" if where else key
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _section(table: Table, name: str) -> Table:
    value = table.get(name)
    return value if isinstance(value, dict) else {}


def _put(result: Translation, path: str, value: Any) -> None:
    *parents, key = path.split(".")
    section = result.table
    for parent in parents:
        below = section.setdefault(parent, {})
        if not isinstance(below, dict):
            return
        section = below
    section[key] = value


def lookup(table: Table, path: str) -> tuple[bool, Any]:
    """Whether ``table`` has a value at the dotted ``path``, and the value."""
    value: Any = table
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return False, None
        value = value[key]
    return True, value


def _move(old: str, new: str, value: Any, table: Table, result: Translation) -> None:
    present, other = lookup(table, new)
    if not present:
        present, other = lookup(result.table, new)
    if present and other != value:
        what = f"{show(value)} here contradicts {show(other)} in {new}, its name in torchtitan 0.3"
        result.problems.append(Problem(old, what, f"keep {new} only"))
        return
    result.warnings.append(f"{old} is read as {new}")
    _put(result, new, value)


def _drop(path: str, value: Any, gone: Gone | None, result: Translation) -> None:
    if gone is None:
        result.warnings.append(f"{path} is ignored: its section is switched off")
    elif value in gone.nothing:
        result.warnings.append(f"{path} is ignored: it asks for nothing ({gone.why})")
    else:
        result.problems.append(Problem(path, f"{show(value)} is not available", gone.why))


def _in_switched_off_section(path: str, table: Table) -> bool:
    section = path.partition(".")[0]
    return section in _SWITCHED_SECTIONS and not _section(table, section).get("enable", False)


def _quantize(path: str, value: Any, table: Table, result: Translation) -> None:
    if _section(table, "model").get("converters"):
        result.problems.append(Problem(path, f"{show(value)} is not available", _NO_QUANTIZE))
    else:
        result.warnings.append(f"{path} is ignored: {_ONLY_FOR_CONVERTERS}")


def _beta(path: str, value: Any, table: Table, result: Translation) -> None:
    result.warnings.append(f"{path} is read as optimizer.betas")
    _put(result, path, value)


def _experiment_name(path: str, value: Any, table: Table, result: Translation) -> None:
    if "description" in _section(table, "job"):
        result.warnings.append(f"{path} is ignored: job.description says what the job is")
    else:
        _move(path, "job.description", value, table, result)


def _expert_tensor_degree(path: str, value: Any, table: Table, result: Translation) -> None:
    tensor = _section(table, "parallelism").get("tensor_parallel_degree", 1)
    _drop(path, value, Gone((1, tensor), "experts follow tensor_parallel_degree"), result)


def _selective_option(path: str, value: Any, table: Table, result: Translation) -> None:
    mode = _section(table, "activation_checkpoint").get("mode", "selective")
    if value in ("op", "2") or mode != "selective":
        result.warnings.append(f"{path} is ignored: selective checkpointing is per operator in torchtitan 0.3")
    else:
        what = f"{show(value)} (every n-th layer) is not available"
        result.problems.append(Problem(path, what, 'torchtitan 0.3 has per-operator selection only; write "op"'))


def _same_as_training(path: str, value: Any, table: Table, result: Translation) -> None:
    key = path.replace("validation.", "training.")
    spellings = (key, key.replace("local_batch_size", "batch_size"))
    same = (_SAME_AS_TRAINING[path], *(lookup(table, spelling)[1] for spelling in spellings))
    _drop(path, value, Gone(same, f"validation uses {key} in torchtitan 0.3"), result)


_SPECIAL: dict[str, Callable[[str, Any, Table, Translation], None]] = {
    "optimizer.beta1": _beta,
    "optimizer.beta2": _beta,
    "job.experiment_name": _experiment_name,
    "parallelism.expert_tensor_parallel_degree": _expert_tensor_degree,
    "activation_checkpoint.selective_ac_option": _selective_option,
    **dict.fromkeys(_SAME_AS_TRAINING, _same_as_training),
}
