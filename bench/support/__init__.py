"""What single benchmarks are made of; `bench/*.py` are the programs."""
