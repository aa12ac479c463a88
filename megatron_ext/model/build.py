"""From the configuration to the model chunks of this rank."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank

from megatron_ext.config.layout import padded_vocab_size
from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.output_head import OutputHead
from megatron_ext.model.spec import block_spec
from megatron_ext.parallel.pipeline import SourceCache


def build_chunks(
    config: RunConfig,
    tc: TransformerConfig,
    mesh: ProcessGroupCollection,
    *,
    vocab_size: int,
) -> list[GPTModel]:
    """The chunks of this pipeline rank, one for each virtual stage, in order.

    Weights are allocated and not drawn: `model.init.initialize` fills them. They are made in
    `tc.params_dtype` at once (no wrapper casts them later, so that parameters which must stay
    float32 do), on the device that `torch.cuda.current_device()` names: GPU, CPU or meta.

    Args:
        config: the run; `config.model` decides the layers.
        tc: made by `parallel.mcore_config.transformer_config` from the same configuration.
        mesh: groups of the layout.
        vocab_size: padded size (`config.layout.padded_vocab_size`), the same in every layout.

    Returns:
        GPTModels without position embedding and with separate input and output embeddings. The
        first chunk of the first rank takes token ids; the last of the last rank gives logits that
        are split over tensor parallel ranks.

    Raises:
        ConfigError: a size does not fit, for example heads that tensor parallelism cannot split.
    """
    try:
        return _build(config, tc, mesh, vocab_size)
    except ConfigError as error:
        raise _as_raised_by_the_layer(error) from None


def _build(
    config: RunConfig, tc: TransformerConfig, mesh: ProcessGroupCollection, vocab_size: int
) -> list[GPTModel]:
    rank = get_pg_rank(mesh.pp)
    virtual_stages = config.parallel.virtual_pipeline
    last_rank = config.parallel.pipeline - 1
    chunks, cache = [], SourceCache()
    for virtual in range(virtual_stages):
        spec = block_spec(config, tc, pipeline_rank=rank, virtual_stage=virtual, cache=cache)
        chunk = GPTModel(
            config=tc,
            transformer_layer_spec=spec,
            vocab_size=vocab_size,
            max_sequence_length=config.data.sequence_length,
            pre_process=rank == 0 and virtual == 0,
            post_process=rank == last_rank and virtual == virtual_stages - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=False,
            position_embedding_type="none",
            pg_collection=mesh,
            vp_stage=virtual if virtual_stages > 1 else None,
        )
        if chunk.post_process:
            del chunk.output_layer  # its memory first
            chunk.output_layer = OutputHead(
                tc, vocab_size=vocab_size, pg_collection=mesh, kernels=config.model.kernels
            )
            chunk.setup_embeddings_and_output_layer()
        chunks.append(chunk)
    return chunks


def _as_raised_by_the_layer(error: ConfigError) -> ConfigError:
    """megatron-core raises an error anew at every level of modules, with a text made from the last
    one's; the first says it once."""
    while isinstance(error.__context__, ConfigError):
        error = error.__context__
    return error


def choose_vocab_size(config: RunConfig, tokens: int) -> int:
    """The padded vocabulary size: as configured, else from the tokenizer. The same in every layout.

    Args:
        tokens: the tokenizer's vocabulary size.

    Raises:
        ConfigError: the configured one is smaller.
    """
    wanted = config.model.vocab_size
    if wanted is not None and wanted < tokens:
        raise ConfigError(
            f"model.vocab_size: {wanted}, but the tokenizer {config.data.tokenizer} has {tokens} "
            f"tokens; use at least that, or leave model.vocab_size out"
        )
    return padded_vocab_size(wanted or tokens)
