"""`install` steps aside where AWS's package is."""

import subprocess
import sys

from conftest import ROOT


def python(code, *path):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join(map(str, (*path, ROOT)))},
    )  # fmt: skip
    return done.stdout.strip()


def test_the_real_package_wins_unless_forced(tmp_path):
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "__init__.py").write_text("simulate = 'AWS'")
    assert python("import nki_emulator; print(nki_emulator.install().simulate)", tmp_path) == "AWS"
    forced = "import nki_emulator; nki_emulator.install(force=True); import nki; print(nki.__emulated__)"
    assert python(forced, tmp_path) == "True"


def test_every_documented_module_imports():
    code = (
        "import nki_emulator; nki_emulator.install(); import nki, nki.language as nl, nki.isa as nisa, nki.typing;"
        "import nki.collectives; from nki.isa.constants import oob_mode;"
        "from nki.language import NKIObject, affine_range; print(oob_mode is nisa.oob_mode, nki.jit is not None)"
    )
    assert python(code) == "True True"
