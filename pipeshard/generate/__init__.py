"""generate: transformers' own generate on a model whose stages are on several ranks."""
