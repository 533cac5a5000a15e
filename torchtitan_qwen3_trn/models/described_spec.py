"""torchtitan's bundle of a model, with the description of the model that exports and checks go by."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.protocols.model_spec import ModelSpec
from transformers import PreTrainedConfig

from torchtitan_qwen3_trn.errors import JobError, Problem


@dataclass(kw_only=True)
class DescribedModelSpec(ModelSpec):
    """A `ModelSpec` that says which Transformers model it is."""

    hf_config: PreTrainedConfig
    """Transformers' configuration of the model; nothing reads config.json again after a job has started."""


def hf_config_of(spec: ModelSpec | None) -> PreTrainedConfig:
    """Transformers' configuration of the model ``spec`` builds.

    Raises:
        JobError: there is no model, or a plugin gave it without a description.
    """
    if isinstance(spec, DescribedModelSpec):
        return spec.hf_config
    if spec is None:
        raise JobError([Problem("model", "the job has no model")])
    what = f"{spec.name} comes without a Transformers configuration, which Hugging Face files need"
    raise JobError([Problem("model", what, f"its plugin should return a {DescribedModelSpec.__name__}")])
