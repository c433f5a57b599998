"""What a user holds: `LLM`, its parameters and outputs, and the way from a model's files to bound weights."""
