"""What the CUDA kernels become as machine code, and what a launch of each costs: the parts of kernel_report.py."""
