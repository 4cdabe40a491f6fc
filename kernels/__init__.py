"""The op set that a transformer is built from, written three times with the same names and signatures.

    kernels.reference   NumPy, plain and slow: the truth that the others are tested against
    kernels.cpu         Numba for the CPU
    kernels.cuda        Numba CUDA, on a GPU or in Numba's simulator

What numbers mean is said once for all of them: :mod:`kernels.dtypes` (float storages), :mod:`kernels.quantization` and
:mod:`kernels.group_fit` (quantised weights), :mod:`kernels.pages` (pages of K and V).
:mod:`kernels.ops` states what every op promises. Nothing here knows of the engine or of a model.
"""
