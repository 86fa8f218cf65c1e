"""Encoders: bidirectional text models with a masked language modelling or classification head."""

from tests.parity.chains.chain import Chain

EXPECTED = {
    # Layer after layer on the hidden states alone.
    Chain(handed_on=("hidden states",)): """
        albert bert big_bird camembert canine convbert data2vec-text distilbert electra ernie esm esmc eurobert fnet
        gte ibert jina_embeddings_v3 layoutlm longformer markuplm megatron-bert mobilebert modernbert mra nomic_bert
        nystromformer rembert roberta roberta-prelayernorm roc_bert squeezebert tapas ultrabert xlm-roberta
        xlm-roberta-xl xmod yoso
    """,
    # Every layer reads positions that a module of its own makes once.
    Chain(handed_on=("hidden states",), beside=("position bias",)): "deberta deberta-v2 layoutlmv3 mpnet roformer",
    # Words and entities are two streams.
    Chain(handed_on=("hidden states", "entity states")): "luke",
    # Text and layout are two streams.
    Chain(handed_on=("hidden states", "layout states")): "lilt",
    # Reversible layers hand on two streams; gradients of all go back in one call, so no cut is between them.
    Chain(handed_on=("hidden states", "attention output")): "reformer",
    # Attention, norms and feed-forward networks are lists side by side; sums between them are made outside.
    Chain(handed_on=("hidden states", "residual"), beside=("earlier residuals", ...)): "flaubert xlm",
    # The decoder reads the first block's result; masks are made from the embeddings.
    Chain(
        handed_on=("hidden states",), beside=("embeddings, or the last block's result", "the first block's result")
    ): "funnel",
}
