"""Checkpoints in and out of the Hugging Face layout of Kimi K3 and Kimi Linear."""
