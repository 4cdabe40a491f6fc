"""The code of the kernels: Numba, which this folder alone imports, and only when something is to be compiled.

Start with :mod:`.microkernel`, which linear layers and attention share.
"""
