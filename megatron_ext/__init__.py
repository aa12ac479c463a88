"""Megatron-Ext: pretraining of Kimi-K3-class models on a released megatron-core."""

__version__ = "0.1.0"
