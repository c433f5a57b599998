"""The executor: batches, the paged KV pool, and the loop that turns prompts into tokens."""
