"""Models of flash_attn: gpt, llama (a gpt by another configuration) and bert."""
