"""Starting runs: torchrun on hosts, SLURM jobs, checks of the machine. Sees errors and config."""
