"""From messages to a prompt's token ids: chat template, tokenizer, fill-in-the-middle."""
