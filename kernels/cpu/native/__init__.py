"""The code of the kernels. It is imported only when something is to be compiled, or to run as plain Python, and Numba with it.

A kernel takes its arguments and, last, its :class:`.share.Share` of the work. Start with :mod:`.norm`, which is plain loops, and
go on with :mod:`.microkernel`, which linear layers and attention share and which is written as vector code.
"""
