"""Layers: models as lists of layers, as DeepSpeed's PipelineModule has them."""
