"""AWS's public kernels on the emulator: ``python -m nki_emulator.public_kernels --help`` runs and compares them."""
