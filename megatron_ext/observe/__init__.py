"""Where numbers go: the registry of metrics, the console, metrics.jsonl, wandb, TensorBoard."""
