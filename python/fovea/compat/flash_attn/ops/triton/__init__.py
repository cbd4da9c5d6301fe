"""What flash_attn has written in Triton, by PyTorch's operators."""
