"""The parts of bench_decode.py: checkpoints, the engines that are compared, their processes, the measurements, the report."""
