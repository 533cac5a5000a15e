"""An emulator of AWS's Neuron Kernel Interface (`nki`) on NumPy, written from AWS's public documentation.

    import nki_emulator
    nki = nki_emulator.install()
    result = nki.simulate(kernel[2])(x, y)
    print(nki_emulator.last_report().cores[0].cycles)

See README.md for what is emulated, what is not, and which public kernels it runs.
"""

from .cost import CoreReport, Report
from .errors import NkiValidationError
from .install import install
from .launch import counting, last_report, simulate

__all__ = ["CoreReport", "NkiValidationError", "Report", "counting", "install", "last_report", "simulate"]
