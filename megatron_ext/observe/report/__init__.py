"""`python -m megatron_ext.observe.report RUN`: a run folder as one self-contained HTML page."""
