"""The parts of bench_memory.py: traces, the memory systems that they are replayed through, the experiments and the report."""
