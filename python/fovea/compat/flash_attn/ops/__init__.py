"""Operations of flash_attn that its modules are made of, by PyTorch's own."""
