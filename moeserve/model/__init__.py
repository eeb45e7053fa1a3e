"""Computes a forward pass: model specs, checkpoint loading, layers, one file per architecture."""
