"""Which tensors of checkpoint files make up which parameter of a Transformers model.

Files hold one tensor per expert and projection; Transformers v5 holds the experts of a layer fused. What is fused from
what is read from Transformers' own conversion table, so that no architecture is named here.

Shapes: E experts, F inner width of an expert, D model width. Files: gate and up [F, D], down [D, F].
Memory: ``gate_up_proj`` [E, 2F, D], ``down_proj`` [E, D, F].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.tensor_names import ROTARY_FREQUENCIES


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The files' side of a model.

    Attributes:
        names: for each parameter, the file tensors it is made of: itself, or the experts' tensors, expert by expert,
            or none for a parameter tied to another one.
        projections: for each fused parameter, how many projections one expert has in it: 2 for gate and up, 1 else.
        shapes: shape of every file tensor.
        tied: parameters that share the storage of another one; files leave them out, and may contain them.
    """

    names: dict[str, tuple[str, ...]]
    projections: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str] = field(default_factory=dict)

    def ignores(self, name: str) -> bool:
        """Whether a file tensor without a place in the model is known to be redundant."""
        return name in self.tied or ROTARY_FREQUENCIES.fullmatch(name) is not None


def layout_of(model: PreTrainedModel) -> Layout:
    """The layout of ``model``, which may be on the meta device.

    Raises:
        JobError: Transformers rebuilds this architecture's files in a way that is not known here.
    """
    rules = [_rule(transform) for transform in get_model_conversion_mapping(model, add_legacy=False)]
    names: dict[str, tuple[str, ...]] = {}
    projections: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tied = dict(model.all_tied_weights_keys)
    for key, tensor in model.state_dict().items():
        if key in tied:
            names[key] = ()
            continue
        templates = next((found for rule in rules if (found := rule(key))), None)
        if templates is None:
            names[key], shapes[key] = (key,), tuple(tensor.shape)
            continue
        experts, rows, columns = tensor.shape
        names[key] = tuple(template.format(expert) for expert in range(experts) for template in templates)
        projections[key] = len(templates)
        shapes.update(dict.fromkeys(names[key], (rows // len(templates), columns)))
    return Layout(names=names, projections=projections, shapes=shapes, tied=tied)


def _rule(transform: object) -> Callable[[str], list[str] | None]:
    """From one entry of Transformers' table: parameter name -> templates of file names, or ``None``."""
    operations = getattr(transform, "operations", [])
    stacks = [(type(step), getattr(step, "dim", None)) for step in operations]
    known = ([(MergeModulelist, 0), (Concatenate, 1)], [(MergeModulelist, 0)])
    if not isinstance(transform, WeightConverter) or stacks not in known or len(transform.target_patterns) != 1:
        what = f"its files need a conversion this route does not know: {transform}"
        raise JobError([Problem("config.json: model_type", what, "use another architecture, or backend native")])
    target = transform.target_patterns[0]
    sources = transform.source_patterns

    def templates(key: str) -> list[str] | None:
        if not key.endswith(target):
            return None
        prefix = key.removesuffix(target)
        return [prefix + source.replace("*", "{}") for source in sources]

    return templates
