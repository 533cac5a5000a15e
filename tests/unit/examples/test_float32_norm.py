"""The plugin package that users copy works as it stands."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import EXAMPLES

PACKAGE = EXAMPLES / "float32_norm"


@pytest.fixture
def installed(install_plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    (name,) = project["project"]["entry-points"]["torchtitan.plugins"]
    site = install_plugin(name, "", distribution=project["project"]["name"], module="float32_norm")
    Path(site, "float32_norm.py").unlink()
    monkeypatch.syspath_prepend(str(PACKAGE))
    yield
    sys.modules.pop("float32_norm", None)


@pytest.mark.usefixtures("installed")
def test_it_replaces_both_norms_of_every_layer_and_takes_fqns(parse_job):
    everywhere = parse_job("", "--plugins.enable", "float32-norm")
    assert everywhere.status is None, everywhere.message
    assert everywhere.job.overrides["float32-norm"] == 4
    one = parse_job('[plugins]\nenable = ["float32-norm"]\n[plugins.float32-norm]\nfqns = ["layers.1.ffn_norm"]\n')
    assert one.job.overrides["float32-norm"] == 1


@pytest.mark.usefixtures("installed")
def test_its_norm_is_more_exact_than_stocks_in_bfloat16():
    import float32_norm
    from torchtitan.models.common.nn_modules import RMSNorm

    stock_config = RMSNorm.Config(normalized_shape=256, eps=1e-6, param_init={"weight": torch.nn.init.ones_})
    ours = float32_norm.float32_norm(stock_config).build()
    assert ours.state_dict().keys() == stock_config.build().state_dict().keys()
    torch.manual_seed(0)
    x_BLD = torch.randn(2, 8, 256, dtype=torch.bfloat16)
    exact = x_BLD.double() * torch.rsqrt(x_BLD.double().pow(2).mean(-1, keepdim=True) + 1e-6)
    # One rounding to bfloat16: half a unit in the last of 8 bits, relative to the value.
    assert ((ours(x_BLD).double() - exact).abs() <= exact.abs() * 2**-8).all()
    assert ours(x_BLD).dtype == torch.bfloat16
