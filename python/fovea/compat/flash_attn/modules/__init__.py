"""Modules of flash_attn: attention, MLPs, blocks, embeddings."""
