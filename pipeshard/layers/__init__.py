"""Layers: models that are lists of layers, like DeepSpeed's PipelineModule."""
